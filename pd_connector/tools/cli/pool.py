# SPDX-License-Identifier: Apache-2.0
"""`pd-connector pool`: what the KV pool of this host holds, whether it can be read, and how to empty it."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pd_connector.errors import ConfigError
from pd_connector.hosts import without_secret
from pd_connector.pool.carrier.asking import CarrierLink
from pd_connector.pool.carrier.messages import Status as CarrierStatus
from pd_connector.pool.part_names import part_codec
from pd_connector.pool.settings import SHM_VARIABLE, make_above, memory_folder, text_of
from pd_connector.pool.store.base import DISK, FAR, Chunk, StoreStatus
from pd_connector.pool.store.folder import VERSION
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.pool.verify import verify
from pd_connector.tools.cli.app import fail

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Show, check or empty the KV pool of this user on this host.",
)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="The pool's disk folder. Default: the one that the engines use.",
        show_default=False,
    ),
]
OfFar = Annotated[
    bool,
    typer.Option(
        "--far",
        help="The chunks of the far store that this host's carrier has put or found, instead of those of this host.",
    ),
]


def _can_answer_prometheus(address: str) -> str:
    """prometheus-client comes with an engine or the router, and only `--metrics` needs it."""
    if address and find_spec("prometheus_client") is None:
        raise typer.BadParameter("needs prometheus-client: pip install prometheus-client")
    return address


Metrics = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        callback=_can_answer_prometheus,
        help="Answer Prometheus there, on /metrics. Whoever reaches it can read it.",
        show_default=False,
    ),
]


def _warned(far: str) -> str:
    """Other users see the options of a command for as long as it runs."""
    if without_secret(far) != far and any(far in argument for argument in sys.argv):
        print(
            "--far has a password, which other users of this host see in the list of processes: give the address in the variable "
            "PD_CONNECTOR_FAR",
            file=sys.stderr,
        )
    return far


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def opened(folder: Path | None) -> Iterator[LocalStore]:
    """The pool of this user, with its disk folder. Ends the command if there is none."""
    memory = memory_folder()
    if folder is not None and not os.path.isdir(folder / VERSION):
        fail(f"no pool in {folder}: name the folder of the config key pool.dir (--dir)")
    if not os.path.isdir(memory) and folder is None:
        fail(
            f"no pool in {memory}: no engine of this user has run with the config key `pool` since this machine started. "
            f"If its tmpfs is another one than /dev/shm, set {SHM_VARIABLE}; if it has a disk folder, name it with --dir"
        )
    try:
        make_above(memory)
        store = LocalStore(Space(memory, 0), visits=True)
        tiers = {tier.name: tier for tier in store.status().tiers}
        if folder is None and DISK in tiers:
            folder = Path(tiers[DISK].path)
        if folder is not None:
            store.close()
            store = LocalStore(Space(memory, 0), Space(folder, 0), visits=True)
    except (ConfigError, OSError) as error:
        fail(str(error))
    try:
        yield store
    finally:
        store.close()


@app.command()
def status(folder: Folder = None, as_json: AsJson = False) -> None:
    """Show how full the pool is, by tier, codec and tenant."""
    with opened(folder) as store:
        report = store.status()
        carrier = carrier_status()
        codecs: dict[str, Counter[str]] = {tier.name: Counter() for tier in report.tiers}
        for chunk in store.chunks():
            codecs[chunk.tier][codec_of(chunk)] += chunk.nbytes
    if as_json:
        tiers = [{**tier._asdict(), "codecs": codecs[tier.name]} for tier in report.tiers]
        printed = {
            **report._asdict(),
            "tiers": tiers,
            "engines": report.engines - 1,
            "unwritable": [each._asdict() for each in report.unwritable],
            "carrier": None if carrier is None else msgspec.to_builtins(carrier),
        }
        print(json.dumps(printed, indent=2))
    else:
        show(report, codecs, Console())
        show_carrier(carrier, Console())


def carrier_status() -> CarrierStatus | None:
    """How the carrier of this host is; None without one."""
    link = CarrierLink(memory_folder())
    try:
        return link.status()
    finally:
        link.close()


@contextmanager
def opened_carrier() -> Iterator[CarrierLink]:
    """The carrier of this host. Ends the command if there is none, or it does not reach its store."""
    link = CarrierLink(memory_folder())
    try:
        status = link.status()
        if status is None:
            fail(
                f"no carrier serves {memory_folder()}: start one with `pd-connector pool carry`, as this user and with its "
                f"{SHM_VARIABLE} if that is set"
            )
        if status.problem:
            fail(f"the carrier of this host cannot use {status.far}: {status.problem}")
        yield link
    finally:
        link.close()


def far_keys(link: CarrierLink) -> list[bytes]:
    """The chunks that a carrier knows to be in its far store, in the order in which it noted them. Ends the command if
    the carrier ends."""
    there: dict[bytes, None] = {}
    after, more = 0, True
    while more:
        page = link.far_page(after)
        if page is None:
            fail("the carrier of this host has ended, or does not answer")
        if page.whole:
            there.clear()
        for key, is_there in page.events:
            there.pop(key, None)
            if is_there:
                there[key] = None
        after, more = page.next, page.more
    return list(there)


def show_carrier(carrier: CarrierStatus | None, console: Console) -> None:
    """Print what a carrier has done."""
    if carrier is None:
        return
    counts = carrier.counts
    console.print(
        f"A carrier reaches {carrier.far} ({'sealed' if carrier.sealed else 'not sealed'}): {counts.get('put', 0):,} chunks put "
        f"({text_of(counts.get('put_bytes', 0))}), {counts.get('brought', 0):,} brought "
        f"({text_of(counts.get('brought_bytes', 0))}), {carrier.waiting:,} wait to be put",
        markup=False,
    )
    reasons = {
        "refused by it": counts.get("not_put", 0),
        "too large for it": counts.get("too_large", 0),
        "damaged here": counts.get("put_damaged", 0),
        "left out, too many waited": counts.get("left_out", 0),
        "failed": counts.get("failed", 0),
    }
    if not_put := ", ".join(f"{reason} {n:,}" for reason, n in reasons.items() if n):
        console.print(f"  not put: {not_put}", markup=False)
    if missed := {name[12:]: n for name, n in counts.items() if name.startswith("not_brought_")}:
        causes = ", ".join(f"{cause} {n:,}" for cause, n in sorted(missed.items()))
        console.print(f"  not brought: {causes}", markup=False)
    if carrier.problem:
        since = f" (for {time.time() - carrier.since_s:,.0f} s)" if carrier.since_s else ""
        console.print(
            f"The far store cannot be used at the moment{since}: {carrier.problem}. Engines compute meanwhile.",
            style="yellow",
            markup=False,
        )


def codec_of(chunk: Chunk) -> str:
    """The codec in which a chunk's KV may have passed."""
    return part_codec(chunk.parts[0])


def show(status: StoreStatus, codecs: Mapping[str, Counter[str]], console: Console) -> None:
    """Print a status as a table, and warnings below it.

    Args:
        codecs: bytes by tier and codec.
    """
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("tier", "chunks", "held", "budget", "full", "folder"):
        table.add_column(
            name, justify="left" if name in ("tier", "folder") else "right", overflow="fold"
        )
    for tier in status.tiers:
        full = f"{tier.nbytes / tier.budget:.0%}" if tier.budget else ""
        budget = text_of(tier.budget) if tier.budget else "not set"
        table.add_row(tier.name, f"{tier.chunks:,}", text_of(tier.nbytes), budget, full, tier.path)
    console.print(table)
    for tier in status.tiers:
        for codec, nbytes in sorted(codecs[tier.name].items()):
            if set(codecs[tier.name]) != {"raw"}:
                console.print(f"  {tier.name}, codec {codec}: {text_of(nbytes)}", markup=False)
        for tenant, nbytes in list(tier.tenants.items())[:20]:
            if len(tier.tenants) > 1:
                console.print(
                    f"  {tier.name}, {f'tenant {tenant}' if tenant else 'no tenant'}: {text_of(nbytes)}",
                    markup=False,
                )
    console.print(
        f"{status.engines - 1} engine processes use it; {status.writing} parts are being written; {status.pinned} pins"
    )
    for refusing in status.unwritable:
        console.print(
            f"Nothing is written to the tier {refusing.tier} (an engine said so {refusing.age_s:.0f} s ago): {refusing.why}",
            style="yellow",
            markup=False,
        )
    if status.problem:
        console.print(
            f"Nothing is saved at the moment: {status.problem}. Engines repair that by themselves; look-ups go on.",
            style="yellow",
            markup=False,
        )


@app.command()
def ls(
    folder: Folder = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only chunks of this tenant.", show_default=False)
    ] = None,
    of_far: OfFar = False,
    as_json: AsJson = False,
) -> None:
    """List the chunks, the oldest first: key, key of the chunk before it, tier, size, codec, parts, tenant.

    With --far: key, and whether this host has the chunk, too. A far store cannot be listed: what it has, and this carrier has
    neither put nor found, is left out.
    """
    if of_far:
        if tenant is not None:
            fail("--tenant: cannot be told of chunks of the far store; leave it out beside --far")
        _list_far(folder, as_json)
        return
    others = set[str]()
    listed = False
    with opened(folder) as store:
        for chunk in store.chunks():
            if tenant is not None and chunk.tenant != tenant:
                others.add(chunk.tenant)
                continue
            listed = True
            fields = {
                "key": chunk.key.hex(),
                "parent": chunk.parent.hex(),
                "tier": chunk.tier,
                "nbytes": chunk.nbytes,
                "codec": codec_of(chunk),
                "parts": list(chunk.parts),
                "tenant": chunk.tenant,
            }
            if as_json:
                print(json.dumps(fields))
            else:
                parent = chunk.parent.hex()[:16] or "-"
                parts = ",".join(chunk.parts)
                print(
                    f"{chunk.key.hex()[:16]}  {parent:16}  {chunk.tier:6}  {text_of(chunk.nbytes):>10}  {codec_of(chunk):4}  {parts}  {chunk.tenant}"
                )
    if tenant is not None and not listed:
        there = ", ".join(repr(name) for name in sorted(others - {""}))
        print(
            f"no chunk of tenant {tenant!r} is there{'; chunks of ' + there if there else ''}",
            file=sys.stderr,
        )


def _list_far(folder: Path | None, as_json: bool) -> None:
    with opened_carrier() as link, opened(folder) as store:
        keys = far_keys(link)
        here = {chunk.key for chunk in store.chunks(keys)}
    for key in keys:
        if as_json:
            print(json.dumps({"key": key.hex(), "tier": FAR, "here": key in here}))
        else:
            print(f"{key.hex()[:16]}  {FAR:6}  {'here, too' if key in here else ''}".rstrip())


@app.command("verify")
def verify_all(
    folder: Folder = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the chunks that are damaged.")
    ] = False,
    of_far: OfFar = False,
) -> None:
    """Read every chunk and check it. Ends with status 1 if one is damaged.

    Engines check what they load by themselves. This finds damage earlier, such as that of a failing disk.
    With --far the carrier reads, and what does not open with its key is damaged.
    """
    if of_far:
        _verify_far(remove)
        return
    chunks = nbytes = 0
    damaged = []
    with opened(folder) as store:
        for checked in verify(store):
            chunks, nbytes = chunks + 1, nbytes + checked.nbytes
            if checked.problem:
                damaged.append(checked.key)
                print(f"damaged: {checked.key.hex()}: {checked.problem}")
        if remove:
            store.remove(damaged)
    print(
        f"{chunks:,} chunks with {text_of(nbytes)} read, {len(damaged)} damaged{', removed' if damaged and remove else ''}"
    )
    if damaged:
        raise typer.Exit(1)


def _verify_far(remove: bool) -> None:
    chunks = nbytes = damaged = gone = 0
    with opened_carrier() as link:
        for key in far_keys(link):
            checked = link.check(key, removes=remove)
            if checked.silent:
                fail(f"{chunks:,} chunks read, then {checked.silent}")
            gone += not checked.nbytes
            chunks, nbytes = chunks + bool(checked.nbytes), nbytes + checked.nbytes
            if checked.problem:
                damaged += 1
                print(f"damaged: {key.hex()}: {checked.problem}")
    print(
        f"{chunks:,} chunks with {text_of(nbytes)} read from the far store, {damaged} damaged"
        f"{', removed' if damaged and remove else ''}, {gone} no longer there"
    )
    if damaged:
        raise typer.Exit(1)


@app.command()
def clear(
    folder: Folder = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove all chunks. Engines go on, and compute again what they would have loaded."""
    with opened(folder) as store:
        keys = store.keys()
        if keys and not (yes or _agreed(f"Remove {len(keys):,} chunks?")):
            fail("nothing is removed")
        print(f"{store.remove(keys):,} chunks removed")


def _agreed(question: str) -> bool:
    """Whether the user says yes. Ends the command if nobody can answer."""
    try:
        return typer.confirm(question)
    except typer.Abort:
        if sys.stdin is not None and sys.stdin.isatty():  # Ctrl-C
            raise
        fail("nobody answers, and nothing is removed: give --yes")


@app.command()
def carry(
    far: Annotated[
        str,
        typer.Option(
            envvar="PD_CONNECTOR_FAR",
            callback=_warned,
            help="The far store, such as redis://HOST:6379; docs/pool.md has all forms. With a password, use the variable: other users see options.",
        ),
    ],
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file of this user alone with the key that all hosts have, as `pd-connector key` prints it. A second line is a "
            "key that only opens, while the key is changed. Without a key only loopback is accepted.",
            show_default=False,
        ),
    ] = None,
    answers_within: Annotated[
        float,
        typer.Option(
            min=0.05,
            max=30.0,
            help="Seconds that the far store has for an answer. Then its client is killed, and engines compute for a while.",
        ),
    ] = 0.2,
    client_python: Annotated[
        str,
        typer.Option(
            help="The Python whose environment has the far store's client, if that clashes with this one: LMCache's does with vLLM. "
            "It needs no pd-connector.",
            show_default=False,
        ),
    ] = "",
    metrics: Metrics = "",
    folder: Folder = None,
) -> None:
    """Share the pool of this host with other hosts, through a store that they all reach. One a host, until SIGTERM.

    Engines of this host need no setting: they use the carrier while it is there.
    """
    from pd_connector.tools.cli.carry import run

    run(far, key_file, answers_within, client_python, metrics, folder)


@app.command()
def lend(
    memory: Annotated[
        str,
        typer.Option(
            help="How much to lend, such as 64GiB. While it is lent, the same command with another size changes that; 0GiB recalls all."
        ),
    ],
    far: Annotated[
        str,
        typer.Option(
            envvar="PD_CONNECTOR_FAR",
            callback=_warned,
            help="Address of the master, as mooncake://MASTER, with ?admin=PORT if its HTTP server has another port than 9003.",
        ),
    ] = "",
    recall_within: Annotated[
        float,
        typer.Option(
            min=1.0,
            max=3600.0,
            help="Seconds after which recalled memory is this host's again, whatever is still in it.",
        ),
    ] = 60.0,
    metrics: Metrics = "",
) -> None:
    """Lend memory of this host to Mooncake. One a host, until SIGTERM, which recalls it: what is in it moves to other nodes.

    LLM engines do not need it: they may start and end as they like.
    """
    from pd_connector.tools.cli.lend import run

    run(memory, far, recall_within, metrics)
