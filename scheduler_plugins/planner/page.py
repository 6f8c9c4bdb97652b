# SPDX-License-Identifier: Apache-2.0
"""The page of a plan, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler_plugins.planner.files import TITLE, fleet_name, simulate_command
from scheduler_plugins.planner.plan import Plan, Row

NOT_SIMULATED = (
    "the API server, tokenization and network of clients",
    "kernels and CUDA graphs beyond the cost model",
    "failures, restarts and engines that start",
    "KV that streams during a prefill beside other transfers of the same engine",
    "a prefix cache and sequences that share one room: engines that do both have the room divided",
)
METRICS = {
    "pd_router:time_to_first_token_seconds": "of the router; for streams",
    "vllm:request_time_per_output_token_seconds": "of the engines that decode",
    "pd_router:rejected_total": "requests that were refused; they count as late",
    "pd_router:handoffs_total": "what became of KV: `recomputed` is work that no plan has",
    "vllm:num_preemptions_total": "sequences that lost their room: the room binds",
}


def page(plan: Plan, trace: str, left_out: list[str]) -> str:
    """The page."""
    return "\n".join(_lines(plan, trace, left_out)) + "\n"


def _lines(plan: Plan, trace: str, left_out: list[str]) -> Iterator[str]:
    chosen = plan.chosen
    engines = " and ".join(plan.sources)
    yield f"{TITLE}{chosen.candidate.name}"
    yield ""
    yield f"**The engines' costs are {engines}.** The rates below are simulated with them. No engine was run for this page."
    for doubt in plan.doubts:
        yield f"- {doubt}."
    yield ""
    ttft_s, tpot_s = plan.promise
    yield (
        f"Promise: first token within {ttft_s * 1e3:g} ms, tokens within {tpot_s * 1e3:g} ms, for 90 % of the requests "
        f"of each class, in each of {len(plan.windows)} windows of {len(plan.windows[0].requests):,} requests of {trace}. The "
        "rate is that of the worst window; the spread is over the four."
    )
    yield ""
    yield f"Recommended: {chosen.candidate.name}, because {plan.why}."
    yield ""
    yield "| search | fleet | requests a second | spread | per GPU | per unit of price and hour | per kW | what binds | costs |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in plan.rows:
        yield _row(row, engines)
    yield ""
    papers = [row for row in plan.rows if row.search not in ("planner", "colocated")]
    losers = [row.search for row in papers if not row.wins]
    if losers:
        yield f"Never within 2 % of the best here: {', '.join(losers)}."
        yield ""
    yield "By what a request costs, best first:"
    yield ""
    for what, uses in _uses(plan.rows):
        ranked = sorted((row.per_s / used, row.search) for row, used in uses)
        shown = ", ".join(f"{search} {rate:.3g}" for rate, search in reversed(ranked))
        yield f"- per {what}: {shown}"
    yield ""
    yield "## If traffic is different"
    yield ""
    yield f"The recommended fleet at {chosen.per_s:.2f} requests a second has {chosen.in_time:.3f} of its worst window in time."
    yield ""
    yield "| what changes | in time, worst window |"
    yield "|---|---|"
    for what, part in plan.varied:
        yield f"| {what} | {part:.3f} |"
    yield ""
    yield "## The same figures again"
    yield ""
    yield "Column `in time` of each command is the part in time of the worst window at the row's rate. Run them in this folder."
    yield ""
    for n, row in enumerate(plan.rows):
        copies = f", one of {row.candidate.copies} copies" if row.candidate.copies > 1 else ""
        yield f"- {row.search}{copies}: {row.in_time:.3f}"
        yield ""
        yield f"      {simulate_command(plan, row, trace, fleet_name(n))}"
        yield ""
    yield "## Compare"
    yield ""
    yield "With the running fleet, after a day. Parts in time of the simulation mean the first two."
    yield ""
    for metric, what in METRICS.items():
        yield f"- `{metric}`: {what}"
    yield ""
    yield "## Not simulated"
    yield ""
    for what in NOT_SIMULATED:
        yield f"- {what}"
    for what in left_out:
        yield f"- not written: {what}"
    yield ""
    yield f"{plan.runs:,} runs of {plan.simulated:,} requests in all."


def _uses(rows: Sequence[Row]) -> Iterator[tuple[str, list[tuple[Row, float]]]]:
    """What a fleet can be divided by, as far as it is known."""
    yield "GPU", [(row, float(row.gpus)) for row in rows]
    if all(row.price_per_h for row in rows):
        yield "unit of price and hour", [(row, row.price_per_h) for row in rows]
    if all(row.watts for row in rows):
        yield "kW", [(row, row.watts / 1e3) for row in rows]


def _row(row: Row, engines: str) -> str:
    low, high = min(row.windows), max(row.windows)
    price = f"{row.per_s / row.price_per_h:.3f}" if row.price_per_h else "-"
    power = f"{row.per_s / row.watts * 1e3:.2f}" if row.watts else "-"
    return (
        f"| {row.search} | {row.candidate.name} | {row.per_s:.2f} | {low:.1f} - {high:.1f} | {row.per_s / row.gpus:.2f} | "
        f"{price} | {power} | {row.binds} | {engines} |"
    )
