# SPDX-License-Identifier: Apache-2.0
"""Alert rules and dashboards name metrics that exist, fire when they should, and reach Prometheus and Grafana."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.alert_cases import CASES, MINUTES
from support.charts import rendered
from support.surface import pool_metrics

from pd_connector.agent import metrics as connector
from scheduler_plugins.router.metrics import Metrics

ROOT = Path(__file__).parents[2]
DOCS, DEPLOY = ROOT / "docs", ROOT / "examples" / "deploy"
RULES = DOCS / "alerts.yaml"
DASHBOARDS = [DOCS / "router-grafana.json", DOCS / "connector-grafana.json"]
SELECTOR = re.compile(r"\b((?:pd_router|pd_connector|pd_scheduler|vllm):\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|on|without|ignoring|group_left) ?\(([^)]*)\)")
OF_PROMETHEUS = {"job", "instance", "le"}


def groups() -> list[dict[str, Any]]:
    found = yaml.safe_load(RULES.read_text())["groups"]
    assert isinstance(found, list)
    return found


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in groups() for rule in group["rules"]}


def expressions() -> list[str]:
    """Every expression of rules and dashboards, with Grafana's variables filled in."""
    found = [rule["expr"] for rule in rules().values()]
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            found += [target["expr"] for target in panel.get("targets", ())]
    return [one.replace("$__rate_interval", "5m").replace("$instance", ".*") for one in found]


def known() -> dict[str, set[str]]:
    """Labels of every series that we register, and of vLLM's, by its name."""
    found: dict[str, set[str]] = {}
    engine = {"model_name", "engine", "rank"}
    counted = {*connector.COUNTERS, *connector.LABELLED}
    for name in {*counted, *connector.GAUGES, *connector.HISTOGRAMS}:
        labels = engine | set(connector.LABELS.get(name, ()))
        kind = "histogram" if name in connector.HISTOGRAMS else ""
        for series in series_of(
            connector.PREFIX + name, "counter" if name in counted else kind or "gauge"
        ):
            found[series] = labels
    for metric in vars(Metrics()).values():
        if hasattr(metric, "_labelnames"):
            for series in series_of(metric._name, metric._type):
                found[series] = set(metric._labelnames)
    found |= {series: set(labels) for series, labels in pool_metrics().items()}
    return found | vllms()


def series_of(name: str, kind: str) -> Iterator[str]:
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    yield from (name + suffix for suffix in suffixes.get(kind, ("",)))


def vllms() -> dict[str, set[str]]:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    text = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    names = re.findall(r"_(gauge|counter|histogram)_cls\(\s*name=\"(vllm:\w+)\"", text)
    assert len(names) > 20
    return {series: {"model_name", "engine"} for kind, n in names for series in series_of(n, kind)}


def unknown_in(expression: str) -> list[str]:
    """Series that do not exist, and labels that no series of the expression has."""
    registry, wrong, labels = known(), [], set(OF_PROMETHEUS)
    for name, matchers in SELECTOR.findall(expression):
        if name.startswith("vllm:") and not find_spec("vllm"):
            continue
        own = registry.get(name)
        if own is None:
            wrong.append(name)
            continue
        labels |= own
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', matchers)))
        wrong += [f"{name}{{{label}}}" for label in sorted(used - own - OF_PROMETHEUS)]
    if not wrong and "vllm:" not in expression:
        grouped = {one.strip() for text in GROUPED.findall(expression) for one in text.split(",")}
        wrong += sorted(grouped - labels - {""})
    return wrong


def test_every_metric_exists_with_its_labels() -> None:
    found = expressions()
    assert len(found) > 70
    assert not [f"{wrong} in {one}" for one in found if (wrong := unknown_in(one))]


def test_a_metric_or_a_label_that_does_not_exist_is_noticed() -> None:
    assert unknown_in("rate(pd_router:requests[5m])") == ["pd_router:requests"]
    assert unknown_in('pd_router:engine_up{side="a"}') == ["pd_router:engine_up{side}"]
    assert unknown_in("sum by (side) (pd_router:engine_up)") == ["side"]
    assert unknown_in("pd_connector:handoffs_total{codec=~'a'}") != []


def test_every_expression_parses() -> None:
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    for expression in expressions():
        parser.parse(expression)
    with pytest.raises(ValueError, match=r"unexpected|unclosed|syntax|parse"):
        parser.parse("sum by (job (pd_router:engine_up)")


def test_every_alert_has_its_section_in_the_runbook() -> None:
    text = (DOCS / "alerts.md").read_text()
    sections = dict(re.findall(r"^## (PD\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [name for name in sections if name in rules()], (
        "no section without an alert"
    )
    for name, rule in rules().items():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        for begin in ("- **It means**", "- **Look at**", "- **Do**"):
            assert begin in sections[name], f"{name} lacks {begin}"


def promtool() -> str:
    found = shutil.which(os.environ.get("PROMTOOL", "promtool"))
    if found is None:
        pytest.skip(
            "no promtool is installed (Debian: apt install prometheus; or name it in PROMTOOL)"
        )
    return found


def run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    program = promtool()
    assert set(CASES) == set(rules()), "every alert has its case"
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                    "eval_time": f"{MINUTES}m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
            ],
        }
        for alert, case in CASES.items()
        for fires, series in ((True, case.fires), (False, case.quiet))
    ]
    file = tmp_path / "alerts_test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    run(program, "check", "rules", str(RULES))
    run(program, "test", "rules", str(file))


def test_prometheus_of_the_compose_file_reads_its_config(tmp_path: Path) -> None:
    text = (DEPLOY / "monitoring" / "prometheus.yml").read_text()
    file = tmp_path / "prometheus.yml"
    file.write_text(text.replace("/etc/prometheus/alerts.yaml", str(RULES)))
    run(promtool(), "check", "config", str(file))


def test_the_compose_file_mounts_what_prometheus_and_grafana_read() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = {}
    for name in ("prometheus", "grafana"):
        for mount in services[name]["volumes"]:
            source, target, mode = mount.split(":")
            assert (DEPLOY / source).resolve().is_file(), source
            assert mode == "ro"
            mounts[target] = (DEPLOY / source).resolve()
    config = yaml.safe_load(mounts["/etc/prometheus/prometheus.yml"].read_text())
    assert [mounts[file] for file in config["rule_files"]] == [RULES]
    ports = {
        words[words.index("--port") + 1]
        for words in (services[name]["command"] for name in ("prefill", "decode", "router"))
    }
    scraped = [
        target
        for job in config["scrape_configs"]
        for one in job["static_configs"]
        for target in one["targets"]
    ]
    assert {one.rpartition(":")[2] for one in scraped} == ports
    provider = yaml.safe_load(mounts["/etc/grafana/provisioning/dashboards/pd.yaml"].read_text())
    folder = provider["providers"][0]["options"]["path"]
    shown = [file for target, file in mounts.items() if target.startswith(f"{folder}/")]
    assert sorted(shown) == sorted(DASHBOARDS)
    source = yaml.safe_load(mounts["/etc/grafana/provisioning/datasources/pd.yaml"].read_text())
    listens = services["prometheus"]["command"][1].partition("=")[2]
    assert source["datasources"][0]["url"] == f"http://{listens}"


def test_the_chart_brings_the_rules_and_dashboards_of_the_documents() -> None:
    for file in (RULES, *DASHBOARDS):
        assert (DEPLOY / "chart" / "files" / file.name).read_text() == file.read_text()
    on = {"prometheusRule": {"enabled": True, "labels": {"release": "x"}}}
    documents = rendered({**on, "dashboards": {"enabled": True}})
    (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
    assert rule["spec"] == {"groups": groups()}
    assert rule["metadata"]["labels"] == {"release": "x"}
    (shown,) = [one for one in documents if one["kind"] == "ConfigMap"]
    assert shown["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert shown["data"] == {file.name: file.read_text() for file in DASHBOARDS}


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_panels_of_a_dashboard_do_not_overlap(file: Path) -> None:
    taken = set()
    panels = json.loads(file.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
