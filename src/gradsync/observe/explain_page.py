"""The page of ``gradsync explain``: a walk through real steps, with the numbers of this very run.

Receives a *story*, plain numbers and texts gathered from all ranks. Whatever comes from a run (names of
parameters, hosts) is escaped here; the sentences are in ``explain_texts``, the drawings are the report's.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gradsync.observe.explain_texts import TEXTS
from gradsync.observe.page import as_script_data, fill

Story = Mapping[str, Any]

LANGUAGES = tuple(TEXTS)
_MUCH_EXPOSED = 0.15


def render_explanation(story: Story, lang: str) -> str:
    """Return the page as HTML, in one of ``LANGUAGES``."""
    page = _Page(story, lang)
    return fill(
        "explain.html",
        {
            "/*LANG*/": lang,
            "/*TITLE*/": escape(f"{page.text('title')}: {story['model']}"),
            "/*BODY*/": "\n".join(page.body()),
            "/*DATA*/": as_script_data(story["recording"]),
        },
    )


class _Page:
    """Builds the sections in the order in which things happen."""

    def __init__(self, story: Story, lang: str) -> None:
        self._story = story
        self._texts = TEXTS[lang]
        self._num_sections = 0

    def text(self, key: str, **values: Any) -> str:
        """Return a sentence with the story's facts and these values in it, escaped."""
        facts = {name: value for name, value in self._story.items() if isinstance(value, str | int | float)}
        return self._texts[key].format(**{name: escape(_spell(value)) for name, value in {**facts, **values}.items()})

    def body(self) -> list[str]:
        """Return the pieces of the page."""
        story = self._story
        made = self.text("made", command=story["command"], version=story["version"], torch=story["torch"])
        return [
            f"<h1>{self.text('title')}</h1>",
            self._paragraph("lead"),
            f'<p class="verdict">{escape(self._verdict())}</p>',
            *self._processes(),
            *self._broadcast(),
            *self._buckets(),
            *self._time(),
            *self._reduce(),
            *self._write_back(),
            *self._equal(),
            *self._no_sync(),
            *self._unused(),
            *self._where(),
            f'<footer class="soft">{made}</footer>',
        ]

    # ------------------------------------------------------------- sections

    def _processes(self) -> list[str]:
        rows = [[p["rank"], p["pid"], p["host"], p["threads"]] for p in self._story["processes"]]
        return [
            self._heading("processes_title"),
            self._paragraph("processes"),
            self._table(["rank", "pid", "host", "threads"], rows),
            self._paragraph("group"),
            '<div id="groups"></div>',
        ]

    def _broadcast(self) -> list[str]:
        processes = self._story["processes"]
        is_same = len({p["checksum_built"] for p in processes}) == 1
        columns = ["value_built", "value_wrapped", "checksum_built", "checksum_wrapped"]
        return [
            self._heading("broadcast_title"),
            self._paragraph("broadcast_same" if is_same else "broadcast_differ", shown=self._shown),
            self._table(["rank", *columns], [[p["rank"], *(p[column] for column in columns)] for p in processes]),
        ]

    def _buckets(self) -> list[str]:
        buckets, cap = self._story["recording"]["buckets"], self._story["cap_bytes"]
        cap_text = self.text("cap_default") if cap is None else self.text("cap_small", cap=_size(cap))
        rows = [
            [place["name"], bucket["number"], place["num_bytes"], place["offset_bytes"]]
            for bucket in buckets
            for place in bucket["parameters"]
        ]
        places = self._table(["parameter", "bucket", "size", "first_byte"], rows)
        return [
            self._heading("buckets_title"),
            self._paragraph("buckets", num_buckets=len(buckets)),
            f"<p>{cap_text} {self.text('map')}</p>",
            '<div id="map"></div>',
            f"<details><summary>{self.text('table_of_places')}</summary>{places}</details>",
        ]

    def _time(self) -> list[str]:
        order = self._story["order"]
        return [
            self._heading("time_title"),
            self._paragraph("first_pass"),
            '<div id="first-pass"></div>',
            self._paragraph("later_pass", number=self._story["last_pass"]),
            '<div id="later-pass"></div>',
            self._paragraph(
                "order",
                first=order["first"],
                first_at=_ms(order["first_s"]),
                last=order["last"],
                last_at=_ms(order["last_s"]),
                early=order["num_early"],
                num_buckets=len(self._story["recording"]["buckets"]),
            ),
        ]

    def _reduce(self) -> list[str]:
        rows = self._story["average"]
        terms = " + ".join(_spell(row["local"]) for row in rows)
        return [
            self._heading("reduce_title"),
            self._paragraph("reduce", number=self._story["average_pass"], shown=self._shown),
            self._table(
                ["rank", "own_gradient", "after_reduce"], [[row["rank"], row["local"], row["result"]] for row in rows]
            ),
            self._paragraph("sum_check", terms=terms, mean=rows[0]["result"]),
        ]

    def _write_back(self) -> list[str]:
        shown = self._story["shown"]
        return [
            self._heading("write_title"),
            self._paragraph("write", name=shown["name"], bucket=shown["bucket"], offset=shown["offset_bytes"]),
        ]

    def _equal(self) -> list[str]:
        processes = self._story["processes"]
        is_equal = len({p["checksum_end"] for p in processes}) == 1
        losses = ", ".join(f"{loss:.7g}" for loss in self._story["last_losses"])
        return [
            self._heading("equal_title"),
            self._paragraph("equal"),
            self._table(["rank", "checksum_end"], [[p["rank"], p["checksum_end"]] for p in processes]),
            f"<p>{self.text('is_equal' if is_equal else 'is_different')} {self.text('losses', losses=losses)}</p>",
        ]

    def _no_sync(self) -> list[str]:
        found = self._story["no_sync"]
        rows = [[row["rank"], row["first"], row["second"], row["result"]] for row in found["rows"]]
        return [
            self._heading("no_sync_title"),
            self._paragraph("no_sync", num_passes=found["num_passes"]),
            self._table(["rank", "first_backward", "second_backward", "no_sync_result"], rows),
        ]

    def _unused(self) -> list[str]:
        found = self._story["unused"]
        names = {"lonely": found["lonely"], "spare": found["spare"]}
        rows = [
            [row["rank"], name, row[f"{kind}_local"], row[f"{kind}_result"]]
            for kind, name in names.items()
            for row in found["rows"]
        ]
        used = {"lonely_used": found["lonely_used"], "spare_used": found["spare_used"]}
        return [
            self._heading("unused_title"),
            self._paragraph("unused", **names, **used),
            self._table(["rank", "parameter", "own_gradient", "after_reduce"], rows),
        ]

    def _where(self) -> list[str]:
        findings = self._story["recording"]["findings"]
        late = findings["straggler"]
        lines = [self.text("not_late")]
        if late is not None:
            lines = [self.text("late", rank=late["rank"], delay=_ms(late["delay_s"]), phase=self._phase(late["phase"]))]
        exposed_s, step_s = findings["exposed_s"], findings["step_s"]
        if exposed_s is not None:
            key = "exposed_much" if exposed_s > _MUCH_EXPOSED * step_s else "exposed_little"
            lines.append(self.text(key, step=_ms(step_s), exposed=_ms(exposed_s)))
        return [
            self._heading("where_title"),
            self._paragraph("where", num_passes=len(self._story["recording"]["ranks"][0]["passes"])),
            '<div id="rank-times"></div>',
            *(f"<p>{line}</p>" for line in lines),
        ]

    # ------------------------------------------------------------- pieces

    @property
    def _shown(self) -> str:
        shown = self._story["shown"]
        return f"{shown['name']}[{', '.join(map(str, shown['index']))}]"

    def _verdict(self) -> str:
        findings = self._story["recording"]["findings"]
        parts = []
        if findings["communication_s"] is not None:
            totals = {"hidden": _ms(findings["hidden_s"]), "total": _ms(findings["communication_s"])}
            parts.append(self._texts["verdict_hidden"].format(**totals))
        if findings["worst_bucket"] is not None:
            share = f"{findings['worst_share']:.0%}".replace("%", " %")
            worst = {"bucket": findings["worst_bucket"], "share": share, "name": findings["worst_parameter"]}
            parts.append(self._texts["verdict_bucket"].format(**worst))
        late = findings["straggler"]
        if late is not None:
            facts = {"rank": late["rank"], "delay": _ms(late["delay_s"]), "phase": self._phase(late["phase"])}
            parts.append(self._texts["verdict_late"].format(**facts))
        if not parts:
            return str(self._story["recording"]["verdict"])
        return ("; " if self._texts is TEXTS["en"] else "；").join(parts)

    def _phase(self, phase: str) -> str:
        return self._texts[f"phase_{phase}"]

    def _heading(self, key: str) -> str:
        self._num_sections += 1
        return f'<h2><span class="count">{self._num_sections}</span>{self.text(key)}</h2>'

    def _paragraph(self, key: str, **values: Any) -> str:
        return f"<p>{self.text(key, **values)}</p>"

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
        head = "".join(f"<th>{self._texts[column]}</th>" for column in columns)
        lines = "".join(f"<tr>{''.join(f'<td>{escape(_spell(v))}</td>' for v in row)}</tr>" for row in rows)
        return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _spell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")
    return str(value)


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.2f} ms" if ms < 1 else f"{ms:.1f} ms" if ms < 100 else f"{ms:,.0f} ms"


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.1f} KiB" if num_bytes >= 2**10 else f"{num_bytes} B"
