# SPDX-License-Identifier: Apache-2.0
# What ci/setup and ci/setup-tests share: words for a person who waits, and an end that leaves no process.

beat_s=8 # at least this often a line says how long it has taken, and what is waited for

say() { printf '%s\n' "$*" >&2; }

# The last line of a log, as far as it fits beside the time.
last_line() { { tail -n 1 "$1" 2>/dev/null || true; } | tr -d '\r' | cut -c1-100; }

# Show words that change: a terminal sees all of them in one place, anything else a line every `beat_s` seconds.
show() {
    if [[ -t 2 ]]; then
        printf '\r\033[K      %4d s  %s' $((SECONDS - begin)) "${1:0:100}" >&2
    elif ((SECONDS >= ${next_beat:=$((SECONDS + beat_s))})); then
        say "      $((SECONDS - begin)) s  $1"
        next_beat=$((SECONDS + beat_s))
    fi
}
shown() { [[ ! -t 2 ]] || printf '\r\033[K' >&2; }

# Two runs at once would spoil each other: the second waits, and then finds the work done.
lock() {
    mkdir -p "$(dirname "$1")"
    command -v flock >/dev/null || return 0
    exec 9>"$1"
    flock -n 9 && return
    say "another $0 is at work here; waiting for it"
    until flock -w 1 9; do show "waiting for another $0"; done
    shown
}

# From here on, everything that this script starts ends with it, however it ends. A signal or an error ends it at once. SIGKILL is
# seen by the reaper of `pd_connector.tools.launch`, which finds processes by a variable that they inherit.
leave_nothing() {
    local interpreter=$1 folder=$root/pd_connector/tools/launch
    family=$(basename "$0")-$$-$RANDOM$RANDOM
    exec 7> >(exec env -u PD_CONNECTOR_FAMILY "$interpreter" -I -S "$folder/proc.py" "$family" $$ >/dev/null 2>&1 9>&-)
    export PD_CONNECTOR_FAMILY=${PD_CONNECTOR_FAMILY:+$PD_CONNECTOR_FAMILY:}$family
    trap "end_all '$interpreter' '$folder' '$family'" EXIT
    trap 'stopped 130' INT
    trap 'stopped 143' TERM
    trap 'stopped 129' HUP
}

end_all() {
    env -u PD_CONNECTOR_FAMILY "$1" -I -S -c 'import sys; sys.path[:0] = sys.argv[1:2]; import proc; proc.end(sys.argv[2])' "$2" "$3" || true
}

stopped() {
    shown
    say "$(basename "$0"): stopped; run it again to go on" || true # the terminal may be gone
    exit "$1"
}
