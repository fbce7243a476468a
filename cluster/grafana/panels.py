"""Panels of a dashboard, from families of metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.rpc.metrics.families import COMMON, Family

QUANTILES = (0.5, 0.95, 0.99)
UNITS = {"seconds": "s", "bytes": "decbytes", "boolean": "short"}
"""Grafana's names of units, where a bare number isn't best."""
Thresholds = Sequence[tuple[float | None, str]]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel without its place on the dashboard."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    description: str = ""
    kind: str = "timeseries"
    """Grafana's type: `timeseries` or `stat`."""
    stacked: bool = False
    most: float | None = None
    """Upper end of the scale."""
    thresholds: Thresholds = field(default=((None, "green"),))
    """Lower bounds and colours of a `stat`; the first colour has no bound."""

    def json(self, number: int, place: dict[str, int]) -> dict[str, Any]:
        """The panel as Grafana's JSON."""
        custom: dict[str, Any] = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never", "spanNulls": False}
        if self.stacked:
            custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
        defaults: dict[str, Any] = {"unit": self.unit, "min": 0}
        if self.most is not None:
            defaults["max"] = self.most
        if self.kind == "timeseries":
            defaults["custom"] = custom
            options: dict[str, Any] = {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        else:
            steps = [{"value": value, "color": color} for value, color in self.thresholds]
            defaults["thresholds"] = {"mode": "absolute", "steps": steps}
            options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": place,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": options,
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": SOURCE,
                    "expr": query.expression,
                    "legendFormat": query.legend,
                    "range": True,
                }
                for index, query in enumerate(self.queries)
            ],
        }


class Panels:
    """Makes panels of one dashboard, whose variables select the processes that are shown."""

    def __init__(self, prefix: str = "") -> None:
        """
        Args:
            prefix: of the metrics' names; `ray_` where Prometheus scrapes Ray's agents.
        """
        self._prefix = prefix

    def rate(self, family: Family, title: str, *by: str, stacked: bool = False, **given: str) -> Panel:
        """A counter's growth per second, or, of a histogram, that of its sum."""
        unit = {"bytes": "binBps"}.get(family.unit, "cps" if family.unit != "seconds" else "s")
        query = Query(f"sum{_by(by)} ({self.increase(family, **given)})", _legend(by))
        return Panel(title, [query], unit, family.help, stacked=stacked)

    def quantiles(self, family: Family, title: str, *by: str, **given: str) -> Panel:
        """Quantiles of a histogram."""
        name = f"{self._prefix}{family.name}_bucket{_selector(family, given)}"
        queries = [
            Query(
                f"histogram_quantile({quantile}, sum by ({', '.join(('le', *by))}) (rate({name}[$__rate_interval])))",
                f"p{quantile * 100:g} {_legend(by)}".strip(),
            )
            for quantile in QUANTILES
        ]
        return Panel(title, queries, UNITS.get(family.unit, "short"), family.help)

    def gauge(self, family: Family, title: str, *by: str, stacked: bool = False, **given: str) -> Panel:
        """A gauge's value, summed over the other labels."""
        query = Query(f"sum{_by(by)} ({self.value(family, **given)})", _legend(by))
        return Panel(title, [query], UNITS.get(family.unit, "short"), family.help, stacked=stacked)

    def stat(
        self, family: Family, title: str, query: str, unit: str = "short", thresholds: Thresholds = ((None, "green"),)
    ) -> Panel:
        """One number, with the family's help as its description."""
        return Panel(title, [Query(query)], unit, family.help, "stat", thresholds=thresholds)

    def share(self, title: str, part: str, whole: str, description: str, *by: str) -> Panel:
        """One sum as a share of another one, for each value of the labels `by`."""
        query = Query(f"sum{_by(by)}({part}) / (sum{_by(by)}({whole}) > 0)", _legend(by))
        return Panel(title, [query], "percentunit", description, most=1.0)

    def increase(self, family: Family, suffix: str = "", **given: str) -> str:
        """The growth per second of each of a family's series."""
        return f"rate({self._prefix}{family.name}{suffix}{_selector(family, given)}[$__rate_interval])"

    def value(self, family: Family, **given: str) -> str:
        """The values of a gauge's series."""
        return f"{self._prefix}{family.name}{_selector(family, given)}"


def _selector(family: Family, given: dict[str, str]) -> str:
    """The labels of the process are the dashboard's variables; `given` are matchers of others."""
    matchers = [f'{label}=~"${label}"' for label in COMMON[family.part] if label not in given]
    matchers += [f'{label}="{value}"' for label, value in given.items()]
    return f"{{{', '.join(matchers)}}}" if matchers else ""


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _legend(labels: Sequence[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)
