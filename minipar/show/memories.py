"""Memory by rank and account: bars of parameters, gradients, optimizer states and activations.

Idea    One bar is one rank, its pieces are the accounts, and all bars have one scale: so what ZeRO takes away, stage by
        stage, is seen as missing pieces. Where there is a prediction, it is a thin bar under the measured one.
Source  The accounts: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.
Read    `Footprint` in `minipar/facts.py`; `minipar/ledger.py` for predictions, `minipar/report.py` for a run's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minipar.show import units
from minipar.show.drawing import Drawing
from minipar.show.palette import ACCOUNTS, GRID, INK, MUTED, ink_on
from minipar.show.svg import BOLD, HALO, Sheet, hatching, text_width
from minipar.show.timelines import MARGIN, draw_title

WIDTH = 1000
RIGHT = 150  # room for the totals
TALL, THIN = 24, 8
LETTERS = {"parameters": "P", "gradients": "G", "optimizer": "O", "activations": "A"}


@dataclass(frozen=True)
class Bar:
    """The bytes of one rank by account, measured or the only ones there are, and predicted ones if any."""

    label: str
    accounts: Mapping[str, float]
    predicted: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Scale:
    """Bytes to pixels."""

    left: float
    per_byte: float

    def x(self, size: float) -> float:
        return self.left + size * self.per_byte


def memory(
    what: Any,
    predicted: Any = None,
    *,
    limit_bytes: float | None = None,
    title: str = "",
) -> Drawing:
    """Bars of memory: for ranks, or for several cases side by side.

    `what` is a list with an entry for each rank, or a mapping from names to entries or lists, such as
    `{"ZeRO 0": ..., "ZeRO 1": ...}`. An entry is a `Footprint`, a state of `ledger.model_state_bytes`, a row `memory`
    of a run's report (which brings its own prediction), or a mapping from accounts to bytes. `predicted` has the same
    shape. `limit_bytes` draws a line: what a rank has. Raises `ValueError` for what is none of this.

        show.memory({f"ZeRO {z}": ledger.model_state_bytes(7e9, dp=8, zero=z) for z in range(4)})
    """
    groups = grouped(what, predicted)
    bars = [bar for _, group in groups for bar in group]
    most = max([limit_bytes or 0, *(total(side) for bar in bars for side in (bar.accounts, bar.predicted or {}))])
    if not most:
        raise ValueError("memory of 0 bytes: there is nothing to draw")
    title = title or headline(groups, limit_bytes)
    title = title[0].upper() + title[1:]
    said = in_words(groups)
    return Drawing(_sheet(title, groups, most, limit_bytes).svg(title, said), title, said)


def _sheet(title: str, groups: list[tuple[str, list[Bar]]], most: float, limit_bytes: float | None) -> Sheet:
    """Title, legend, axis and bars."""
    bars = [bar for _, group in groups for bar in group]
    sheet = Sheet(WIDTH)
    y = draw_title(sheet, title)
    shown = [account for account in ACCOUNTS if any(bar.accounts.get(account) for bar in bars)]
    _draw_legend(sheet, y, shown, any(bar.predicted for bar in bars))
    y += 48 if limit_bytes else 36
    top = y
    left = max(80.0, MARGIN + 12 + max(text_width(bar.label, 12) for bar in bars))
    scale = Scale(left, (WIDTH - left - RIGHT) / most)
    ground, above = Sheet(WIDTH), Sheet(WIDTH)
    for name, group in groups:
        if name:
            ground.text(MARGIN, y + 12, name, 13, INK, more=BOLD)
            y += 20
        for bar in group:
            y = _draw_bar(ground, above, bar, y, scale)
        y += 8 if name else 0
    _draw_axis(sheet, most, scale, top, y)
    sheet.write(ground.content)
    if limit_bytes:
        x = scale.x(limit_bytes)
        sheet.line(x, top - 8, x, y, INK, 1.8, "6 3")
        sheet.text(x + 5, top - 4, f"limit {units.size(limit_bytes)}", 11, INK)
    sheet.write(above.content)
    sheet.height = y + 44
    return sheet


# Reading what was given.


def grouped(what: Any, predicted: Any) -> list[tuple[str, list[Bar]]]:
    """The bars, under the names of their groups; one group without a name for a plain list."""
    if isinstance(what, Mapping) and not set(what) & {*ACCOUNTS, "activations_peak", "weights"}:
        if predicted is not None and set(predicted) != set(what):
            raise ValueError(f"predicted for {sorted(predicted)}, measured for {sorted(what)}: give the same names")
        single = not any(_is_list(value) for value in what.values())
        if single:
            names = list(what)
            return [
                ("", bars_of([what[n] for n in names], [predicted[n] for n in names] if predicted else None, names))
            ]
        return [(str(name), bars_of(value, predicted[name] if predicted else None)) for name, value in what.items()]
    return [("", bars_of(what, predicted))]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def bars_of(entries: Any, predicted: Any, names: Sequence[str] | None = None) -> list[Bar]:
    """A bar for each entry; entries in a row that are alike become one, when there are more than 16."""
    rows = list(entries) if _is_list(entries) else [entries]
    others = list(predicted) if _is_list(predicted) else [predicted] * len(rows)
    if len(others) != len(rows):
        raise ValueError(f"{len(rows)} entries, {len(others)} predictions: give one for each")
    bars = []
    for number, (row, other) in enumerate(zip(rows, others, strict=True)):
        own = row.get("predicted") if isinstance(row, Mapping) else None
        rank = row.get("rank", number) if isinstance(row, Mapping) else number
        label = names[number] if names else f"rank {rank}" if len(rows) > 1 else "each rank"
        expected = other if other is not None else own
        bars.append(Bar(label, accounts_of(row), accounts_of(expected) if expected is not None else None))
    return _folded(bars) if len(bars) > 16 and not names else bars


def _folded(bars: list[Bar]) -> list[Bar]:
    """Neighbours that hold the same become one bar, "rank 0 to 15"."""
    found: list[Bar] = []
    for bar in bars:
        if found and (found[-1].accounts, found[-1].predicted) == (bar.accounts, bar.predicted):
            first = found[-1].label.split(" to ")[0]
            found[-1] = Bar(f"{first} to {bar.label.removeprefix('rank ')}", bar.accounts, bar.predicted)
        else:
            found.append(bar)
    return found


def accounts_of(entry: Any) -> dict[str, float]:
    """Bytes by account, of whatever has them."""
    read = entry.get if isinstance(entry, Mapping) else lambda name, default=None: getattr(entry, name, default)
    aliases = {"parameters": "weights", "activations": "activations_peak"}
    found = {}
    for account in ACCOUNTS:
        value = read(account)
        if value is None:
            value = read(aliases.get(account, account))
        if value is not None:
            found[account] = float(value)
    if not found:
        raise ValueError(
            f"{entry!r} is no memory: give a Footprint, a row of a report, or bytes by {', '.join(ACCOUNTS)}"
        )
    return found


# In words.


def total(accounts: Mapping[str, float]) -> float:
    """The bytes of all accounts together."""
    return sum(accounts.values())


def headline(groups: list[tuple[str, list[Bar]]], limit_bytes: float | None) -> str:
    """The message: who holds most, and of what; or how much less the last case needs than the first."""
    bars = [(name, bar) for name, group in groups for bar in group]
    name, fullest = max(bars, key=lambda pair: total(pair[1].accounts))
    who = f"{name}, {fullest.label}" if name else fullest.label
    most = total(fullest.accounts)
    account = max(fullest.accounts, key=lambda account: fullest.accounts[account])
    said = f"{who} holds {units.size(most)}, {units.share(fullest.accounts[account] / most)} of it {account}"
    if limit_bytes:
        return f"{said}: {'more than' if most > limit_bytes else 'within'} the {units.size(limit_bytes)} of a rank"
    cases = (
        [total(group[0].accounts) for _, group in groups] if len(groups) > 1 else [total(b.accounts) for _, b in bars]
    )
    names = [name for name, _ in groups] if len(groups) > 1 else [bar.label for _, bar in bars]
    if len(cases) > 1 and not names[0].startswith("rank") and cases[-1] < cases[0]:
        return f"{names[0]} needs {units.size(cases[0])} a rank, {names[-1]} {units.size(cases[-1])}"
    return said


def in_words(groups: list[tuple[str, list[Bar]]]) -> str:
    """Every bar as a sentence."""
    said = []
    for name, group in groups:
        for bar in group:
            pieces = [f"{account} {units.size(value)}" for account, value in bar.accounts.items() if value]
            expected = f", predicted {units.size(total(bar.predicted))}" if bar.predicted else ""
            who = f"{name}, {bar.label}" if name else bar.label
            said.append(f"{who}: {units.several(pieces)}, together {units.size(total(bar.accounts))}{expected}.")
    return " ".join(said)


# On the sheet.


def _draw_legend(sheet: Sheet, y: float, accounts: Sequence[str], predicted: bool) -> None:
    x: float = MARGIN
    for account in accounts:
        _draw_piece(sheet, account, x, y, 20, 12)
        sheet.text(x + 26, y + 10, f"{LETTERS[account]}  {account}", 11, MUTED)
        x += text_width(account, 11) + 62
    if predicted:
        sheet.rect(x, y + 2, 20, THIN, "#c9ced4")
        sheet.text(x + 26, y + 10, "thin: predicted", 11, MUTED)


def _draw_piece(sheet: Sheet, account: str, x: float, y: float, width: float, height: float, tip: str = "") -> None:
    """One account of a bar. Gradients are hatched, so that no two of them differ by colour alone."""
    sheet.rect(x, y, width, height, ACCOUNTS[account], tip=tip)
    if account == "gradients":
        sheet.path(hatching(x, y, width, height, 7), "#ffffff", 1, more=' stroke-opacity="0.55"')


def _draw_bar(sheet: Sheet, above: Sheet, bar: Bar, y: float, scale: Scale) -> float:
    """A rank: its accounts in a row, the prediction below, and `above` all lines the total behind; returns where the
    next begins."""
    sheet.text(scale.left - 10, y + TALL / 2 + 4, bar.label, 12, INK, "end")
    x = scale.left
    for account, value in bar.accounts.items():
        width = value * scale.per_byte
        _draw_piece(sheet, account, x, y, max(width - 1, 0), TALL, f"{bar.label}: {account} {units.size(value)}")
        _draw_amount(sheet, account, value, x, y, width)
        x += width
    end = x
    below = y + TALL + 2
    if bar.predicted:
        x = scale.left
        for account, value in bar.predicted.items():
            _draw_piece(sheet, account, x, below, max(value * scale.per_byte - 1, 0), THIN)
            x += value * scale.per_byte
        end, below = max(end, x), below + THIN
    above.text(end + 8, y + TALL / 2 + 4, units.size(total(bar.accounts)), 12, INK, more=BOLD + HALO)
    if bar.predicted:
        above.text(end + 8, below, f"predicted {units.size(total(bar.predicted))}", 10, MUTED, more=HALO)
    return below + 8


def _draw_amount(sheet: Sheet, account: str, value: float, x: float, y: float, width: float) -> None:
    """Letter and bytes on a piece, the letter alone, or nothing: what fits."""
    ink = ink_on(ACCOUNTS[account])
    for text in (f"{LETTERS[account]} {units.size(value)}", LETTERS[account]):
        wide = text_width(text, 11)
        if wide + 8 < width:
            if account == "gradients":
                sheet.rect(x + width / 2 - wide / 2 - 2, y + 5, wide + 4, TALL - 10, ACCOUNTS[account])
            sheet.text(x + width / 2, y + TALL / 2 + 4, text, 11, ink, "middle")
            return


def _draw_axis(sheet: Sheet, most: float, scale: Scale, top: float, bottom: float) -> None:
    """Bytes, at round numbers."""
    power = 10.0 ** (len(str(int(most / 5))) - 1)
    step = next(s * power for s in (1, 2, 5, 10) if most / (s * power) <= 8)
    sheet.line(scale.left, bottom, WIDTH - RIGHT, bottom, INK)
    mark = 0.0
    while mark <= most * (1 + 1e-9):
        x = scale.x(mark)
        sheet.line(x, top, x, bottom, GRID)
        sheet.line(x, bottom, x, bottom + 4, INK)
        sheet.text(x, bottom + 16, units.size(mark), 11, MUTED, "middle")
        mark += step
    sheet.text(scale.x(most / 2), bottom + 32, "bytes of one rank", 11, MUTED, "middle")
