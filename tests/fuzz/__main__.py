# SPDX-License-Identifier: Apache-2.0
"""`python -m fuzz`: fuzz for some minutes, then replay what was found, here and on a live agent.

Needs atheris (`pip install -e '.[fuzz]'`). Exit code 1 if anything was found that nobody may cause.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LONGEST = 1 << 16


def main() -> int:
    options = _options()
    if options.inside:
        _fuzz(options)
    with tempfile.TemporaryDirectory(prefix="pd-fuzz-") as scratch:
        folder = options.corpus or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "fuzz", *sys.argv[1:], "--inside", "--corpus", str(folder)]
        code = subprocess.run(command, check=False).returncode
        if code:
            print(f"found something: the input is in this folder, exit code {code}")
            return 1
        return _replay(options, folder, time.monotonic() - began)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--greeted", action="store_true", help="begin after the handshakes")
    parser.add_argument("--key", action="store_true", help="the engines have a key")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to fuzz")
    parser.add_argument("--corpus", type=Path, help="folder to begin with, and to add to")
    parser.add_argument(
        "--keep", action="store_true", help="replace the corpus that the tests replay"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _fuzz(options: argparse.Namespace) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["pd_connector"]):
        from fuzz.targets import Targets
    from fuzz.mutation import Mutator
    from fuzz.replay import mode, read_corpus
    from fuzz.seeds import seeds

    def mutate(data: bytes, most: int) -> bytes:
        return bytes(atheris.Mutate(data, most))  # libFuzzer puts it there when it begins

    known = seeds() + read_corpus(mode(keyed=options.key, greeted=options.greeted))
    for number, script in enumerate(known):
        (options.corpus / f"seed-{number:03}").write_bytes(script)
    targets = Targets(keyed=options.key, greeted=options.greeted)
    limits = [f"-max_total_time={round(60 * options.minutes)}", f"-max_len={LONGEST}"]
    arguments = [sys.argv[0], *limits, "-timeout=20", "-rss_limit_mb=4096", str(options.corpus)]
    mutator = Mutator(known, mutate)
    atheris.Setup(arguments, targets.run, custom_mutator=mutator)
    atheris.Fuzz()


def _replay(options: argparse.Namespace, folder: Path, seconds: float) -> int:
    """Everything again, without instruments; says what it came to."""
    from fuzz.replay import growth, minimal, mode, on_live_agent, write_corpus
    from fuzz.targets import Targets

    scripts = [path.read_bytes() for path in sorted(folder.iterdir())]
    with Targets(keyed=options.key, greeted=options.greeted) as targets:
        grown = growth(targets, scripts)
        kept = minimal(targets, scripts) if options.keep else []
    on_live_agent(scripts, keyed=options.key)
    if options.keep:
        write_corpus(mode(keyed=options.key, greeted=options.greeted), kept)
    print(f"{seconds:.0f} s, {len(scripts)} inputs kept, no finding; growth: {grown} objects")
    return int(grown > 0)


if __name__ == "__main__":
    sys.exit(main())
