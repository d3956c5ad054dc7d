"""Charts as inline SVG, drawn by hand: no library, no script, colours from the page's style sheet.

Each is an ``svg`` element with a title and a description for those who cannot see it. Widths are such that a
chart can be read on a phone; what is wider, such as a large confusion matrix, scrolls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from .markup import Markup, join, tag

__all__ = ["bars", "confusion_matrix", "lines"]

Values = Sequence[float | None]

_WIDTH, _HEIGHT = 440, 270
_BAR_WIDTH = 330
_BAR_COLOURS = (1, 0, 2, 3)  # what others are held against comes first, and is grey
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 20, 14, 40
_MOST_POINTS = 400  # of a line; more cannot be told apart
_MOST_NUMBERS = 20  # classes up to which cells have their number
_MOST_NAMES = 60  # classes up to which rows and columns have their name
_LEVELS = 10  # shades of a cell


def lines(
    title: str,
    x: Sequence[float],
    series: Mapping[str, Values],
    *,
    x_label: str,
    y_label: str,
    marked: tuple[str, int] | None = None,
) -> Markup:
    """Lines over one axis; a value that is None leaves a gap. ``marked``: a series and an index to ring.

    >>> lines("Loss", [1, 2], {"loss": [2.0, 1.0]}, x_label="epoch", y_label="loss")[:38]
    '<svg class="chart" role="img" viewBox='
    """
    known = [value for values in series.values() for value in values if value is not None]
    if not known or not x:
        return _svg(title, "There are no values to draw.", _WIDTH, 60, _text(_WIDTH / 2, 34, "no values"))
    y_ticks = _ticks(min(known), max(known), 5)
    x_ticks = [tick for tick in _ticks(x[0], x[-1], 6) if x[0] <= tick <= x[-1] and tick == int(tick)]
    across = _scale(x[0], x[-1], _LEFT, _WIDTH - _RIGHT)
    up = _scale(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(x_ticks, y_ticks, across, up, x_label, y_label)]
    for number, (name, values) in reversed(list(enumerate(series.items()))):  # the first lies on top
        parts.append(_line(name, number, x, values, across, up, x_label))
    if marked:
        parts.append(_mark(marked, x, series, across, up))
    ends = ", ".join(
        f"{name} from {_short(seen[0])} to {_short(seen[-1])}"
        for name, values in series.items()
        if (seen := [v for v in values if v is not None])
    )
    return _svg(title, f"{y_label} by {x_label}: {ends}.", _WIDTH, _HEIGHT, *parts)


def bars(title: str, values: Mapping[str, float | None], form: Callable[[float], str]) -> Markup:
    """One bar below the other, each with its name above and its value behind; None is said to be unavailable.

    >>> "<title>Peak</title>" in bars("Peak", {"exact": 2.0, "this run": None}, str)
    True
    """
    largest = max((value for value in values.values() if value is not None), default=0.0) or 1.0
    room, height = _BAR_WIDTH - 96, 46
    parts = []
    for number, (name, value) in enumerate(values.items()):
        top = number * height
        parts.append(_text(0, top + 14, _cut(name, 42), "start", full=name))
        width = room * (value or 0.0) / largest
        parts.append(
            tag(
                "rect",
                x=0,
                y=top + 20,
                width=_round(max(width, 1.0)),
                height=16,
                rx=3,
                class_=_fill(_BAR_COLOURS[number % 4]),
            )
        )
        said = "unavailable" if value is None else form(value)
        parts.append(_text(width + 8, top + 33, said, "start", "value"))
    told = "; ".join(f"{name}: {'unavailable' if v is None else form(v)}" for name, v in values.items())
    return _svg(title, told, _BAR_WIDTH, max(1, len(values)) * height, *parts)


def confusion_matrix(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Markup:
    """Rows are the true classes, columns what was predicted; a cell's shade is its share of its row.

    >>> matrix = confusion_matrix([[8, 2], [0, 5]], ["cat", "dog"])
    >>> "13 of 15" in matrix
    True
    """
    classes = len(counts)
    cell = 64 if classes <= 4 else 44 if classes <= 10 else 36 if classes <= _MOST_NUMBERS else 0
    cell = cell or (16 if classes <= _MOST_NAMES else max(3, 720 // classes))
    named = classes <= _MOST_NAMES
    left = 34 + 8 * max((len(_cut(name, 16)) for name in names), default=0) if named else 30
    top = left if classes > 4 and named else 30 + 24 * named
    side = cell * classes
    right, total = sum(counts[i][i] for i in range(classes)), sum(map(sum, counts))
    parts = [tag("g", *_cells(counts, cell), transform=f"translate({left} {top})")]
    if named:
        parts += _names(names, cell, left, top, turned=classes > 4)
    if classes <= _MOST_NUMBERS:
        parts.append(tag("g", *_numbers(counts, names, cell), transform=f"translate({left} {top})"))
    frame = tag("rect", x=left, y=top, width=side, height=side, class_="frame")
    parts += [
        frame,
        _text(left + side / 2, 14, "predicted", class_="label"),
        _turned(14, top + side / 2, "true class"),
    ]
    told = f"{right} of {total} are on the diagonal, that is predicted as what they are."
    return _svg("Confusion matrix", told, left + side + 6, top + side + 6, *parts, natural=True)


def _svg(
    title: str, description: str, width: float, height: float, *parts: Markup, natural: bool = False
) -> Markup:
    """With ``natural`` the chart keeps its size and the page scrolls it; else it takes the width there is."""
    size = {"width": _round(width), "height": _round(height)} if natural else {}
    view = f"0 0 {_round(width)} {_round(height)}"
    head = (tag("title", title), tag("desc", description))
    return tag("svg", *head, *parts, class_="chart", role="img", viewBox=view, aria_label=title, **size)


def _axes(
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    across: Callable[[float], float],
    up: Callable[[float], float],
    x_label: str,
    y_label: str,
) -> Markup:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    step = y_ticks[1] - y_ticks[0]
    parts = []
    for tick in y_ticks:
        y = _round(up(tick))
        parts.append(tag("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(_text(_LEFT - 7, up(tick) + 4, _decimal(tick, step), "end"))
    for tick in x_ticks:
        parts.append(_text(across(tick), bottom + 17, f"{tick:g}"))
    parts.append(tag("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 5, x_label, class_="label"))
    parts.append(_turned(12, (_TOP + bottom) / 2, y_label))
    return join(*parts)


def _line(
    name: str,
    number: int,
    x: Sequence[float],
    values: Values,
    across: Callable[[float], float],
    up: Callable[[float], float],
    x_label: str,
) -> Markup:
    """The line in pieces between its gaps; where points are few, each has a dot that tells its value."""
    parts = []
    for piece in _pieces(values):
        points = [f"{_round(across(x[i]))},{_round(up(values[i] or 0.0))}" for i in _thinned(piece, values)]
        style = f"line {_stroke(number)}"
        if len(points) > 1:
            parts.append(tag("polyline", points=" ".join(points), class_=style))
        if len(values) > 30 and len(points) > 1:
            continue
        for i in piece:
            told = f"{name}, {x_label} {x[i]:g}: {_short(values[i] or 0.0)}"
            centre = {"cx": _round(across(x[i])), "cy": _round(up(values[i] or 0.0))}
            parts.append(tag("circle", tag("title", told), r=3, class_=_fill(number), **centre))
    return join(*parts)


def _mark(
    marked: tuple[str, int],
    x: Sequence[float],
    series: Mapping[str, Values],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> Markup:
    name, index = marked
    value = series[name][index]
    if value is None:
        return Markup("")
    return tag("circle", cx=_round(across(x[index])), cy=_round(up(value)), r=6, class_="ring")


def _cells(counts: Sequence[Sequence[int]], cell: int) -> Iterator[Markup]:
    """One path per shade: a matrix of 200 classes has 40,000 cells."""
    squares: dict[int, list[str]] = {}
    for row, line in enumerate(counts):
        whole = sum(line)
        for column, count in enumerate(line):
            if count:
                level = max(1, math.ceil(_LEVELS * count / whole))
                squares.setdefault(level, []).append(f"M{column * cell} {row * cell}h{cell}v{cell}h-{cell}z")
    for level, parts in sorted(squares.items()):
        yield tag("path", d="".join(parts), class_="cell", fill_opacity=round(level / _LEVELS, 2))


def _numbers(counts: Sequence[Sequence[int]], names: Sequence[str], cell: int) -> Iterator[Markup]:
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            dark = count and 2 * count > sum(line)
            told = f"{names[row]} predicted as {names[column]}: {count} of {sum(line)}"
            yield tag(
                "text",
                tag("title", told),
                _many(count),
                x=_round((column + 0.5) * cell),
                y=_round((row + 0.5) * cell + 4.5),
                text_anchor="middle",
                class_="on-cell" if dark else "in-cell" if count else "faint",
            )


def _names(names: Sequence[str], cell: int, left: int, top: int, *, turned: bool) -> Iterator[Markup]:
    size = "small" if cell < 20 else None
    for i, name in enumerate(names):
        middle = (i + 0.5) * cell
        yield _text(left - 7, top + middle + 4.5, _cut(name, 16), "end", size, full=name)
        if turned:
            turn = f"translate({_round(left + middle + 4)} {top - 7}) rotate(-90)"
            yield tag("text", tag("title", name), _cut(name, 16), transform=turn, class_=size)
        else:
            yield _text(left + middle, top - 10, _cut(name, 8), class_=size, full=name)


def _text(
    x: float, y: float, text: str, anchor: str = "middle", class_: str | None = None, full: str | None = None
) -> Markup:
    title = tag("title", full) if full not in (None, text) else None
    return tag("text", title, text, x=_round(x), y=_round(y), text_anchor=anchor, class_=class_)


def _turned(x: float, y: float, text: str) -> Markup:
    turn = f"translate({_round(x)} {_round(y)}) rotate(-90)"
    return tag("text", text, transform=turn, text_anchor="middle", class_="label")


def _pieces(values: Values) -> Iterator[list[int]]:
    piece: list[int] = []
    for i, value in enumerate(values):
        if value is not None:
            piece.append(i)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _thinned(piece: list[int], values: Values) -> list[int]:
    """Of a long line the lowest and the highest point of every stretch, so that no peak is lost."""
    if len(piece) <= _MOST_POINTS:
        return piece
    stretch = math.ceil(2 * len(piece) / _MOST_POINTS)
    kept = {piece[0], piece[-1]}
    for start in range(0, len(piece), stretch):
        part = piece[start : start + stretch]
        kept |= {min(part, key=lambda i: values[i] or 0.0), max(part, key=lambda i: values[i] or 0.0)}
    return sorted(kept)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers around a range, at least two.

    >>> _ticks(0.13, 0.92, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> _ticks(7, 7, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _decimal(tick: float, step: float) -> str:
    if abs(tick) >= 1e5 or step < 1e-4:
        return f"{tick:.0e}"
    return f"{tick:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _short(value: float) -> str:
    return f"{value:.4g}"


def _many(count: int) -> str:
    """
    >>> _many(999), _many(1234), _many(56_789), _many(3 * 10**6)
    ('999', '1.2k', '57k', '3.0M')
    """
    for size, unit in ((10**6, "M"), (1000, "k")):
        if count >= size:
            return f"{count / size:.{int(count < 10 * size)}f}{unit}"
    return str(count)


def _cut(text: str, most: int) -> str:
    """Names that are too long lose their middle: those of a set often differ at the end.

    >>> _cut("Flower kind number 12", 16)
    'Flower k…mber 12'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}…{text[len(text) - (most - half - 1) :]}"


def _round(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _fill(number: int) -> str:
    return f"fill-{number % 4}"


def _stroke(number: int) -> str:
    return f"stroke-{number % 4}"
