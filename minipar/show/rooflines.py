"""The roofline of a cluster: why tensor parallel wants the link inside a node, and data parallel does not care.

Idea    A GPU computes as fast as its peak, or as fast as bytes arrive, whichever is slower: with x FLOPs for each byte
        that is read or sent, at most `min(peak, x * bandwidth)`. On two logarithmic axes that is a flat roof with a
        slope for each thing that bytes come through: its memory, the link inside a node, the one outside. What stands
        to the right of a slope's top can live on it. Tensor parallel's x shrinks with each rank, for a block's work
        is shared while its messages are not; data parallel's grows with the tokens between two sums of gradients.
Legend  M tokens of a micro-batch, D hidden, K width of all keys, F width inside the MLP, T sequence, t = tp.
Source  Williams, Waterman and Patterson 2009, 'Roofline: An Insightful Visual Performance Model'. Only bandwidth
        counts: latency is in `minipar/collectives.py`.
Read    `minipar/layout.py`, which adds up what is only compared here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import atan2, ceil, degrees, floor, log10

from minipar.collectives import ring_bytes
from minipar.layout import PER_VALUE, Cluster, Job, Layout, layers_of
from minipar.show import units
from minipar.show.drawing import Drawing
from minipar.show.palette import GRID, HATCH, INK, MUTED, PAPER, RANKS
from minipar.show.svg import BOLD, BOLDER, Sheet, text_width
from minipar.show.timelines import MARGIN, draw_title

WIDTH, HEIGHT = 1000, 340  # of the sheet, of what is between the axes
LEFT, RIGHT = 100, 976
DEGREES = (2, 4, 8, 16)  # of tensor parallelism
COLOURS = {"product": RANKS[2], "tensor parallel": RANKS[1], "data parallel": RANKS[0], "pipeline": RANKS[3]}
SHAPES = {"product": "square", "tensor parallel": "circle", "data parallel": "diamond", "pipeline": "triangle"}
WORDS = {
    "product": "products of a block, over memory",
    "tensor parallel": "tensor parallel's messages",
    "data parallel": "data parallel's",
    "pipeline": "a pipeline border's",
}


@dataclass(frozen=True)
class Point:
    """Work of one GPU and the bytes that come with it. `bandwidth` is of what they go through where the layout puts
    them; `ranks` exchange them (1: they are read from memory)."""

    kind: str
    name: str
    flops: float
    moved_bytes: float
    bandwidth: float
    ranks: int = 1

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.moved_bytes


@dataclass(frozen=True)
class Roof:
    """A slope: what bytes come through."""

    name: str
    bandwidth: float
    dash: str

    def ridge(self, peak: float) -> float:
        """FLOPs a byte from which it is no limit."""
        return peak / self.bandwidth


# The arithmetic.


def attainable(peak: float, bandwidth: float, intensity: float) -> float:
    """FLOP/s of a GPU at most: `min(peak, intensity * bandwidth)`."""
    return min(peak, intensity * bandwidth)


def intensities(job: Job, cluster: Cluster, layout: Layout) -> list[Point]:
    """What a layout computes and moves: each product of a block (forward, read from and written to memory once), and
    the messages of each cut that it makes, as a ring sends them."""
    points = products(job, cluster, layout)
    cuts = ((tensor_parallel, layout.tp), (data_parallel, layout.dp), (pipeline_border, layout.pp))
    return points + [cut(job, cluster, layout) for cut, degree in cuts if degree > 1]


def products(job: Job, cluster: Cluster, layout: Layout) -> list[Point]:
    """[M, k] times [k, n] is 2 M k n FLOPs over M k + k n + M n values; a rank has 1/t of n, or of k."""
    model, t, M = job.model, layout.tp, layout.micro_batch * job.sequence
    D, F = model.hidden, model.mlp
    shapes = {
        "queries, keys, values": (D, (D + 2 * model.kv) / t),
        "attention's output": (D / t, D),
        "into the MLP": (D, (2 if model.gated else 1) * F / t),
        "out of the MLP": (F / t, D),
    }
    memory = cluster.gpu.memory_bandwidth
    return [
        Point("product", f"{name}, tp {t}", 2.0 * M * k * n, PER_VALUE * (M * k + k * n + M * n), memory)
        for name, (k, n) in shapes.items()
    ]


def tensor_parallel(job: Job, cluster: Cluster, layout: Layout) -> Point:
    """A block and a micro-batch, forward and backward: four all_reduces of M D values, for 1/t of the work."""
    t, M = layout.tp, layout.micro_batch * job.sequence
    flops = M * job.model.block_flops(job.sequence) / t
    moved = 4 * ring_bytes("all_reduce", PER_VALUE * M * job.model.hidden, t)
    return Point("tensor parallel", f"tp {t}", flops, moved, cluster.link(t, 1).bandwidth, t)


def data_parallel(job: Job, cluster: Cluster, layout: Layout) -> Point:
    """A step: one all_reduce of the rank's gradients, for the work of its replica's tokens. Gradients and work are an
    equal share of the model's, so that tp and pp cancel."""
    dp, share = layout.dp, layout.tp * layout.pp
    tokens = job.global_batch * job.sequence / dp
    flops = tokens * job.model.token_flops(job.sequence) / share
    moved = ring_bytes("all_reduce", PER_VALUE * job.model.parameters / share, dp)
    return Point("data parallel", f"dp {dp}", flops, moved, cluster.link(dp, share).bandwidth, dp)


def pipeline_border(job: Job, cluster: Cluster, layout: Layout) -> Point:
    """A micro-batch in the blocks of a rank: for each chunk M D / t values forward, and as many backward."""
    M, inside = layout.micro_batch * job.sequence, layout.pp * layout.tp <= cluster.per_node
    flops = M * layers_of(job, layout) * job.model.block_flops(job.sequence) / layout.tp
    moved = 2.0 * layout.chunks * PER_VALUE * M * job.model.hidden / layout.tp
    link = cluster.inside if inside else cluster.outside
    return Point("pipeline", f"pp {layout.pp}", flops, moved, link.bandwidth, layout.pp)


def usual_layouts(job: Job, cluster: Cluster) -> list[Layout]:
    """Tensor parallel of 2, 4, 8 and 16, the rest replicas; and one with a pipeline of 4. Those that there can be."""
    tries = [(tp, 1) for tp in DEGREES] + [(min(8, cluster.per_node), 4)]
    found = []
    for tp, pp in tries:
        dp, odd = divmod(cluster.gpus, tp * pp)
        if dp and not odd and job.model.heads % tp == 0 and pp <= job.model.layers and job.global_batch % dp == 0:
            found.append(Layout(dp, tp, pp))
    return found


def roofs(cluster: Cluster) -> list[Roof]:
    """Memory and links of one GPU, the fastest first."""
    inside, outside = cluster.inside, cluster.outside
    found = [
        Roof("memory", cluster.gpu.memory_bandwidth, ""),
        Roof(f"inside a node, {inside.name}", inside.bandwidth, "9 3"),
    ]
    if cluster.gpus > cluster.per_node:
        found.append(Roof(f"between nodes, {outside.name}", outside.bandwidth, "2 3"))
    return found


# The picture.


@dataclass(frozen=True)
class Axes:
    """FLOPs a byte and FLOP/s to pixels; both are logarithms."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    top: float

    def x(self, intensity: float) -> float:
        return LEFT + (RIGHT - LEFT) * (log10(intensity) - self.low_x) / (self.high_x - self.low_x)

    def y(self, speed: float) -> float:
        return self.top + HEIGHT * (self.high_y - log10(speed)) / (self.high_y - self.low_y)

    @property
    def bottom(self) -> float:
        return self.top + HEIGHT


def roofline(job: Job, cluster: Cluster, layouts: Sequence[Layout] = ()) -> Drawing:
    """Compute against memory and links: the roofs of a GPU, and where products and messages of layouts lie under them.

    Without `layouts`, tensor parallel of 2 to 16 with replicas, and a pipeline. Raises `ValueError`, one line, where
    none of these can be.

        show.roofline(Job(catalogue.model("llama2-70b"), 4096, 1024), cluster)
    """
    layouts = list(layouts) or usual_layouts(job, cluster)
    if not layouts:
        raise ValueError(
            f"{cluster.gpus} GPUs, {job.model.heads} heads and a global batch of {job.global_batch:,} rows have none "
            "of the usual layouts: give layouts=[Layout(dp, tp, pp), ...]"
        )
    points = list(dict.fromkeys(point for layout in layouts for point in intensities(job, cluster, layout)))
    title, words = headline(job, cluster, layouts), in_words(points, cluster)
    sheet = Sheet(WIDTH)
    top = _draw_legend(sheet, draw_title(sheet, title), points, cluster)
    axes = axes_of(points, cluster, top)
    taken: list[Box] = []
    _draw_axes(sheet, axes)
    _draw_roofs(sheet, axes, cluster, taken)
    for point in points:
        _draw_point(sheet, axes, point, cluster, taken)
    for point in sorted(points, key=lambda point: shares(point, cluster)[1]):  # first those that must be beside a slope
        if point.kind != "product":
            _draw_name(sheet, axes, point, cluster, taken)
    sheet.height = axes.bottom + 48
    return Drawing(sheet.svg(title, words), title, words)


def axes_of(points: Sequence[Point], cluster: Cluster, top: float) -> Axes:
    """Wide enough for all points and for the tops of all slopes."""
    peak = cluster.gpu.peak_flops
    reach = [point.intensity for point in points] + [roof.ridge(peak) for roof in roofs(cluster)]
    lowest = min(shares(point, cluster)[1] for point in points)
    low_y = log10(peak * min(lowest / 25, 1 / 120))
    return Axes(log10(min(reach) / 12), log10(max(reach) * 2.5), low_y, log10(peak * 2), top)


# In words.


def shares(point: Point, cluster: Cluster) -> tuple[float, float]:
    """Shares of the peak that are attainable: where the layout puts it; and, for tensor parallel, which is all that
    there is a choice for, with each rank in another node."""
    peak, across = cluster.gpu.peak_flops, cluster.outside.bandwidth
    here = attainable(peak, point.bandwidth, point.intensity) / peak
    if point.kind != "tensor parallel" or cluster.gpus <= cluster.per_node:
        return here, here
    return here, min(here, attainable(peak, across, point.intensity) / peak)


def headline(job: Job, cluster: Cluster, layouts: Sequence[Layout]) -> str:
    """The message: how near to the peak the links let the layout come that has the largest tensor-parallel group of a
    node, and its replicas."""
    within = [layout for layout in layouts if layout.tp <= cluster.per_node] or list(layouts)
    layout = max(within, key=lambda layout: (layout.tp, layout.dp))
    said = []
    if layout.tp > 1:
        here, across = shares(tensor_parallel(job, cluster, layout), cluster)
        where = f" inside a node, {units.share(across)} across nodes" if across < here else ""
        said.append(f"tensor parallel of {layout.tp} can reach {units.share(here)} of the peak{where}")
    if layout.dp > 1:
        here, _ = shares(data_parallel(job, cluster, layout), cluster)
        where = " across nodes" if cluster.gpus > cluster.per_node else ""
        said.append(f"data parallel of {layout.dp} can reach {units.share(here)}{where}")
    if not said:
        lean = min(products(job, cluster, layout), key=lambda point: point.intensity)
        said.append(f"memory lets the leanest product reach {units.share(shares(lean, cluster)[0])} of the peak")
    title = "; ".join(said)
    return title[0].upper() + title[1:]


def in_words(points: Sequence[Point], cluster: Cluster) -> str:
    """Every roof and every point as a sentence."""
    peak = cluster.gpu.peak_flops
    said = [f"A GPU computes at most {speed(peak)}."]
    for roof in roofs(cluster):
        enough = units.amount(roof.ridge(peak))
        said.append(f"{roof.name}, {units.size(roof.bandwidth)}/s: enough from {enough} FLOPs a byte.")
    for point in points:
        here, across = shares(point, cluster)
        apart = f", {units.share(across)} with each rank in another node" if across < here else ""
        enough = units.amount(point.intensity)
        said.append(f"{point.name}: {enough} FLOPs a byte, at most {units.share(here)} of the peak{apart}.")
    return " ".join(said)


def speed(flops: float) -> str:
    """ "989 TFLOP/s"."""
    return f"{units.plain(flops / 1e12)} TFLOP/s"


# On the sheet.

Box = tuple[float, float, float, float]  # left, top, right, bottom


def _draw_legend(sheet: Sheet, y: float, points: Sequence[Point], cluster: Cluster) -> float:
    """What the marks are; returns where the next thing may begin."""
    x: float = MARGIN
    for kind in (kind for kind in COLOURS if any(point.kind == kind for point in points)):
        _draw_mark(sheet, kind, x + 6, y + 6)
        sheet.text(x + 18, y + 10, WORDS[kind], 11, MUTED)
        x += text_width(WORDS[kind], 11) + 38
    if any(across < here for here, across in (shares(point, cluster) for point in points)):
        y += 20
        _draw_mark(sheet, "tensor parallel", MARGIN + 6, y + 6, hollow=True)
        said = "hollow, with its share of the peak: the same messages with each rank in another node"
        sheet.text(MARGIN + 18, y + 10, said, 11, MUTED)
    return y + 48


def _draw_mark(sheet: Sheet, kind: str, x: float, y: float, hollow: bool = False, tip: str = "") -> None:
    """A square, circle, diamond or triangle around (x, y)."""
    outlines = {
        "square": f"M{x - 4.5:.1f} {y - 4.5:.1f}h9v9h-9Z",
        "circle": f"M{x - 5.5:.1f} {y:.1f}a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0 -11 0Z",
        "diamond": f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7Z",
        "triangle": f"M{x:.1f} {y - 6.5:.1f}l6.5 11.5h-13Z",
    }
    said = f"><title>{escape(tip)}</title></path>" if tip else "/>"
    fill, stroke = (PAPER, COLOURS[kind]) if hollow else (COLOURS[kind], INK)
    sheet.write(f'<path class="{kind.replace(" ", "-")}" d="{outlines[SHAPES[kind]]}" fill="{fill}" stroke="{stroke}" '
                f'stroke-width="{2.2 if hollow else 1}"{said}')  # fmt: skip


def _draw_axes(sheet: Sheet, axes: Axes) -> None:
    """Powers of ten along x; 1, 2 and 5 of each along y."""
    for power in range(ceil(axes.low_x), floor(axes.high_x) + 1):
        x = axes.x(10.0**power)
        sheet.line(x, axes.top, x, axes.bottom, GRID)
        sheet.line(x, axes.bottom, x, axes.bottom + 4, INK)
        sheet.text(x, axes.bottom + 16, units.amount(10.0**power), 11, MUTED, "middle")
    for power in range(floor(axes.low_y), ceil(axes.high_y)):
        for digit in (1, 2, 5):
            value = digit * 10.0**power
            if axes.low_y <= log10(value) <= axes.high_y:
                sheet.line(LEFT, axes.y(value), RIGHT, axes.y(value), GRID)
                sheet.text(LEFT - 8, axes.y(value) + 4, speed(value), 11, MUTED, "end")
    sheet.line(LEFT, axes.bottom, RIGHT, axes.bottom, INK)
    sheet.line(LEFT, axes.top, LEFT, axes.bottom, INK)
    said = "FLOPs for each byte that is sent, or read from memory and written to it"
    sheet.text((LEFT + RIGHT) / 2, axes.bottom + 34, said, 11, MUTED, "middle")
    sheet.text(MARGIN, axes.top - 12, "FLOP/s of one GPU, at most", 11, MUTED)


def _draw_roofs(sheet: Sheet, axes: Axes, cluster: Cluster, taken: list[Box]) -> None:
    """The slopes, each with its name along it and a line down from its top, and the flat roof."""
    peak, low = cluster.gpu.peak_flops, 10.0**axes.low_y
    level = axes.y(peak)
    ends = [(axes.x(roof.ridge(peak)), f"enough from {units.amount(roof.ridge(peak))}") for roof in roofs(cluster)]
    for end, _ in ends:
        sheet.line(end, level, end, axes.bottom, HATCH, 1, "1 3")
    for roof, (end, _) in zip(roofs(cluster), ends, strict=True):
        start = max(10.0**axes.low_x, low / roof.bandwidth)
        x, y = axes.x(start), axes.y(start * roof.bandwidth)
        sheet.line(x, y, end, level, INK, 1.8, roof.dash)
        pieces = int((end - x) / 8)
        steps = [(x + (end - x) * i / pieces, y + (level - y) * i / pieces) for i in range(pieces)]
        taken += [(sx - 2, sy - 4, sx + 6, sy + 3) for sx, sy in steps]
        angle = degrees(atan2(level - y, end - x))
        at = f' transform="rotate({angle:.2f} {x:.1f} {y:.1f})"'
        sheet.text(x + 18, y - 6, f"{roof.name}: {units.size(roof.bandwidth)}/s", 11, INK, more=at)
    for end, said in ends:
        beside = [(x, axes.bottom - 7) for x in (end + 5, end - 5 - text_width(said, 11))]
        _write(sheet, said, beside, axes, taken, MUTED)
    sheet.line(ends[0][0], level, RIGHT, level, INK, 2.4)
    said = f"peak: {speed(peak)}"
    sheet.text(RIGHT, level - 10, said, 11, INK, "end", BOLD)
    taken.append((RIGHT - BOLDER * text_width(said, 11), level - 21, RIGHT, level - 7))


def _draw_point(sheet: Sheet, axes: Axes, point: Point, cluster: Cluster, taken: list[Box]) -> None:
    """A mark where the layout puts it, and a hollow one below for ranks in different nodes, joined by a line."""
    peak, (here, across) = cluster.gpu.peak_flops, shares(point, cluster)
    x, y, below = axes.x(point.intensity), axes.y(here * peak), axes.y(across * peak)
    tip = f"{point.name}: {units.amount(point.intensity)} FLOPs a byte, at most {units.share(here)} of the peak"
    if across < here:
        sheet.line(x, y, x, below, COLOURS[point.kind], 2)
        _draw_mark(sheet, point.kind, x, below, True, f"{point.name}, each rank in another node: {units.share(across)}")
        taken.append((x - 2, y, x + 2, below))
        taken.append((x - 7, below - 7, x + 7, below + 7))
    _draw_mark(sheet, point.kind, x, y, tip=tip)
    taken.append((x - 7, y - 7, x + 7, y + 7))


def _draw_name(sheet: Sheet, axes: Axes, point: Point, cluster: Cluster, taken: list[Box]) -> None:
    """The name of a point, near its lowest mark, where there is room."""
    here, across = shares(point, cluster)
    x, y = axes.x(point.intensity), axes.y(across * cluster.gpu.peak_flops)
    text = f"{point.name}: {units.share(across)}" if across < 1 else point.name
    half = text_width(text, 11) / 2
    near = [(x - half, y + drop) for drop in (22, -12, 36, -26, 50, 64)]
    places = [(x + 11, y + 12), (x + 11, y + 22)] if across < here else near
    found = _write(sheet, text, places, axes, taken)
    if found and abs(found[1] - y) > 22:
        sheet.line(x, y + (8 if found[1] > y else -8), x, found[1] + (-11 if found[1] > y else 3), MUTED, 0.8)


def _write(
    sheet: Sheet, text: str, places: list[tuple[float, float]], axes: Axes, taken: list[Box], ink: str = INK
) -> tuple[float, float] | None:
    """The text at the first place where it covers nothing, inside of the axes; returns the place, if there is one."""
    width = text_width(text, 11)
    for x, y in places:
        x = min(max(x, LEFT + 4), RIGHT - width - 2)
        box = (x - 4, y - 10, x + width + 4, y + 3)
        if axes.top + 10 < y < axes.bottom - 4 and not any(_overlap(box, other) for other in taken):
            sheet.text(x, y, text, 11, ink)
            taken.append(box)
            return x, y
    return None


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
