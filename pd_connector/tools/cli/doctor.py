# SPDX-License-Identifier: Apache-2.0
"""`pd-connector doctor`: finds what prevents a handoff, and says what to do about it."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from pd_connector.hosts import without_secret
from pd_connector.tools.cli.checks import (
    additions,
    asking,
    handshake,
    limits,
    model,
    network,
    peer,
    pool,
    probe,
    software,
    together,
    transports,
)
from pd_connector.tools.cli.checks.facts import Facts
from pd_connector.tools.cli.checks.finding import Finding, Status, show
from pd_connector.tools.launch.progress import working


def doctor(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Say whether this model hands over: its folder, or its name if it was downloaded here.",
            show_default=False,
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="URL", help="Also visit this engine. May be repeated."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="VLLM_API_KEY", help="Key of the peers' HTTP interface.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check versions, transports, network, GPU, limits and models, and say what to do.

    Ends with status 1 if anything fails.
    """
    # Progress goes to standard error, so that --json can be piped.
    with working(Console(stderr=True), "looking at this machine") as progress:
        findings = [finding for name in models or () for finding in model.check(name)]
        findings += examine(probe.look())
        visits = []
        for url in peers or ():
            progress(f"asking {without_secret(url)}")
            visits.append(visit(url, api_key))
        findings += [finding for visit in visits for finding in visit.findings]
        findings += together.check([visit.report for visit in visits if visit.report is not None])
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        show(findings, Console())
    if any(finding.status is Status.FAIL for finding in findings):
        raise typer.Exit(1)


def examine(facts: Facts) -> list[Finding]:
    """All findings about this machine. Pure."""
    areas = (software, additions, transports, network, limits, pool)
    return [finding for area in areas for finding in area.check(facts)]


def visit(url: str, api_key: str | None = None) -> peer.Visit:
    """What is found at the engine at `url`."""
    try:
        base = asking.url_of(url)
    except asking.PeerError as error:
        return peer.Visit([Finding(without_secret(url), "URL", Status.FAIL, str(error))])
    return peer.check(base, asking.asker(base, api_key), peer.connect, handshake.greet)
