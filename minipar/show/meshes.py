"""A picture of the mesh: which rank is where, with whom it talks along each axis, and on which links.

Idea    The ranks are drawn as they are numbered: tensor-parallel neighbours beside each other, stages below each other,
        replicas as blocks. The nodes are grey grounds under them, so one sees at once which axis stays inside a
        node. With the traffic of a step, links are as thick as the bytes that they carry.
Source  The order of the axes: Narayanan et al. 2021, arXiv:2104.04473, section 3.
Read    `minipar/mesh.py` before; `links.py` for the lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minipar.facts import Traffic, Volume
from minipar.show import units
from minipar.show.drawing import Drawing
from minipar.show.links import LINES, draw_links, drawn, thickness
from minipar.show.palette import INK, MUTED, PAPER
from minipar.show.svg import BOLD, TIMES, Sheet, wrapped
from minipar.show.timelines import MARGIN, draw_title

WIDTH = 1000
MOST_COLUMNS, MOST_ROWS = 16, 32
NODE = "#eceef1"
PAD = 11  # of a node's ground around its ranks
SIDE = 12  # more of it at the left, for its name
AXES = {"tp": "tensor parallel", "pp": "pipeline parallel", "dp": "data parallel"}


class MeshLike(Protocol):
    """What is read of a `minipar.Mesh`, which may be a plan."""

    shape: dict[str, int]

    @property
    def size(self) -> int: ...

    def groups(self, axis: str) -> list[list[int]]: ...

    def coordinates(self, rank: int) -> dict[str, int]: ...


@dataclass(frozen=True)
class Box:
    """Where a rank is drawn."""

    rank: int
    row: int
    column: int
    x: float
    y: float
    width: float
    height: float


def mesh(
    mesh: MeshLike,
    traffic: Traffic | Sequence[Mapping[str, Any]] | None = None,
    ranks_per_node: int = 8,
    *,
    title: str = "",
) -> Drawing:
    """Ranks, groups and links of a mesh.

    `traffic` is what one rank sends in a step: a `Traffic`, or the rows `communication` of a run's report. Ranks are
    put on nodes in their order, `ranks_per_node` on each. Replicas that there is no room for are left out, and the
    picture says so. Raises `ValueError` for more than 16 slices or 32 stages.
    """
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node={ranks_per_node}: a node has at least one rank")
    if mesh.shape["tp"] > MOST_COLUMNS or mesh.shape["pp"] > MOST_ROWS:
        raise ValueError(f"{mesh.shape}: a picture has room for tp up to {MOST_COLUMNS} and pp up to {MOST_ROWS}")
    volumes = volumes_of(traffic)
    title = title or headline(mesh, volumes, ranks_per_node)
    sheet = Sheet(WIDTH)
    top = draw_title(sheet, title) + 24
    boxes = place(mesh, top + 10)
    _draw_nodes(sheet, boxes, ranks_per_node)
    _draw_names(sheet, mesh, boxes, top)
    lines = [(axis, about(mesh, axis, volumes, ranks_per_node)) for axis in AXES if mesh.shape[axis] > 1]
    loads = {axis: sum(v.bytes for (group, _), v in volumes.items() if group == axis) for axis in AXES}
    draw_links(sheet, mesh.shape, {box.rank: box for box in boxes}, mesh.groups, loads)
    _draw_ranks(sheet, mesh, boxes)
    y = _draw_left_out(sheet, mesh, boxes)
    for axis, said in lines:
        y = _draw_line(sheet, axis, said, y, thickness(axis, loads))
    sheet.height = y
    description = " ".join([*(said for _, said in lines), nodes_in_words(mesh, ranks_per_node)])
    return Drawing(sheet.svg(title, description), title, description)


# In words.


def volumes_of(traffic: Traffic | Sequence[Mapping[str, Any]] | None) -> dict[tuple[str, str], Volume]:
    """Calls and bytes of a step by (group, operation), from a `Traffic` or from the rows of a report."""
    if isinstance(traffic, Traffic):
        return dict(traffic.volumes)
    return {
        (row["group"], row["op"]): Volume(int(row.get("calls_per_step", 0)), int(row["bytes_per_step"]))
        for row in traffic or ()
    }


def crossing(mesh: MeshLike, axis: str, ranks_per_node: int) -> bool:
    """Whether groups of this axis reach over more than one node."""
    return any(len({rank // ranks_per_node for rank in group}) > 1 for group in mesh.groups(axis))


def headline(mesh: MeshLike, volumes: Mapping[tuple[str, str], Volume], ranks_per_node: int) -> str:
    """The message: the shape, and who stays inside a node."""
    shape = mesh.shape
    parts = {"dp": "replica", "pp": "stage", "tp": "slice"}
    made = f" {TIMES} ".join(units.count(shape[axis], noun) for axis, noun in parts.items() if shape[axis] > 1)
    said = f"{units.count(mesh.size, 'rank')}{f' = {made}' if made else ''}"
    split = [axis for axis in AXES if shape[axis] > 1]
    if not split:
        return said
    bytes_of = lambda axis: sum(v.bytes for (group, _), v in volumes.items() if group == axis)
    total = sum(map(bytes_of, split))
    where = lambda axis: "across nodes" if crossing(mesh, axis, ranks_per_node) else "inside a node"
    if total:
        busiest = max(split, key=bytes_of)
        return f"{said}: {units.share(bytes_of(busiest) / total)} of the bytes are {AXES[busiest]}, {where(busiest)}"
    inside = [axis for axis in split if not crossing(mesh, axis, ranks_per_node)]
    return f"{said}: {units.several(inside) or 'no axis'} {'stays' if len(inside) < 2 else 'stay'} inside a node"


def about(mesh: MeshLike, axis: str, volumes: Mapping[tuple[str, str], Volume], ranks_per_node: int) -> str:
    """One axis in words: its groups, where they reach, what a rank sends to them."""
    groups = mesh.groups(axis)
    shown = " | ".join(map(members, groups[:4])) + (f" and {len(groups) - 4} more" if len(groups) > 4 else "")
    where = "across nodes" if crossing(mesh, axis, ranks_per_node) else "inside a node"
    said = f"{AXES[axis]} ({axis}), {where}. {units.count(len(groups), 'group')} of ranks {shown}."
    if not all(drawn(axis, rank, mesh.shape) for group in groups for rank in group):
        said += " Drawn for the first slice only."
    sent = [
        f"{op} {units.size(volume.bytes)}" + (f" in {units.count(volume.calls, 'call')}" if volume.calls else "")
        for (group, op), volume in sorted(volumes.items())
        if group == axis
    ]
    return said + (f" A rank's step: {units.several(sent)}." if sent else "")


def members(group: list[int]) -> str:
    """The ranks of a group: "0-7", "0,8,16,24", "0,32,64,..."."""
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    return ",".join(map(str, group[:4])) + (",..." if len(group) > 4 else "")


def nodes_in_words(mesh: MeshLike, ranks_per_node: int) -> str:
    """ "8 ranks on 2 nodes of 4."."""
    nodes = -(-mesh.size // ranks_per_node)
    return f"{units.count(mesh.size, 'rank')} on {units.count(nodes, 'node')} of {ranks_per_node}."


# On the sheet.


def place(mesh: MeshLike, top: float) -> list[Box]:
    """Where each rank lies: slices from left to right, stages downwards, replicas as blocks beside each other."""
    tp, pp = mesh.shape["tp"], mesh.shape["pp"]
    replicas = min(mesh.shape["dp"], max(MOST_COLUMNS // tp, 1))
    columns = replicas * tp
    left: float = MARGIN + (62 if pp > 1 else 0) + PAD + SIDE
    gap = 56 if columns <= 4 else 30 if columns <= 8 else 14
    between = max(gap, 2 * PAD + SIDE + 10) if tp > 1 else max(gap, 2 * PAD + SIDE + 4)
    gaps = (tp - 1) * replicas * gap + (replicas - 1) * between
    width = min((WIDTH - left - MARGIN - PAD - gaps) / columns, 150)
    left += (WIDTH - left - MARGIN - PAD - gaps - width * columns) / 2
    height, row_gap = (50, 70) if pp <= 8 else (26, 50)
    boxes = []
    for rank in range(replicas * pp * tp):
        at = mesh.coordinates(rank)
        x = left + at["dp"] * (tp * width + (tp - 1) * gap + between) + at["tp"] * (width + gap)
        y = top + 34 + at["pp"] * (height + row_gap)
        boxes.append(Box(rank, at["pp"], at["dp"] * tp + at["tp"], x, y, width, height))
    return boxes


def _draw_nodes(sheet: Sheet, boxes: list[Box], ranks_per_node: int) -> None:
    """A ground under the ranks of each node: under each rank, and between neighbours; its name at its left side."""
    grid = {(box.row, box.column): box for box in boxes}
    node = lambda box: box.rank // ranks_per_node
    for (row, column), box in grid.items():
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            corners = [grid.get((row + i, column + j)) for i in {0, down} for j in {0, right}]
            if all(corner and node(corner) == node(box) for corner in corners):
                last = grid[row + down, column + right]
                width, height = last.x + last.width - box.x, last.y + last.height - box.y
                sheet.rect(box.x - PAD - SIDE, box.y - PAD, width + 2 * PAD + SIDE, height + 2 * PAD, NODE, ' rx="7"')
    named = set[int]()
    for box in boxes:
        if node(box) not in named:
            named.add(node(box))
            x, y = box.x - PAD - 1, box.y + box.height / 2
            turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"'
            sheet.text(x, y, f"node {node(box)}", 10, MUTED, "middle", turned)


def _draw_names(sheet: Sheet, mesh: MeshLike, boxes: list[Box], top: float) -> None:
    """The coordinates, at the edges: replicas above, stages at the left."""
    for box in boxes:
        at = mesh.coordinates(box.rank)
        if at["tp"] == 0 and at["pp"] == 0 and mesh.shape["dp"] > 1:
            end = next(b for b in reversed(boxes) if b.row == 0 and mesh.coordinates(b.rank)["dp"] == at["dp"])
            sheet.text((box.x + end.x + end.width) / 2, top + 8, f"replica {at['dp']}", 12, INK, "middle", BOLD)
        if box.column == 0 and mesh.shape["pp"] > 1:
            sheet.text(box.x - PAD - SIDE - 10, box.y + box.height / 2 + 4, f"stage {at['pp']}", 12, INK, "end", BOLD)


def _draw_ranks(sheet: Sheet, mesh: MeshLike, boxes: list[Box]) -> None:
    """The ranks themselves, above the lines."""
    for box in boxes:
        middle = box.x + box.width / 2
        sheet.rect(box.x, box.y, box.width, box.height, PAPER, f' rx="5" stroke="{INK}" stroke-width="1.2"')
        place = "  ".join(f"{axis} {at}" for axis, at in mesh.coordinates(box.rank).items())
        if box.width >= 84 and box.height >= 40:
            sheet.text(middle, box.y + 22, f"rank {box.rank}", 13, INK, "middle", BOLD)
            sheet.text(middle, box.y + 38, place, 10, MUTED, "middle")
        else:
            label = f"rank {box.rank}" if box.width >= 52 else str(box.rank)
            sheet.text(middle, box.y + box.height / 2 + 4, label, 12, INK, "middle", BOLD)


def _draw_left_out(sheet: Sheet, mesh: MeshLike, boxes: list[Box]) -> float:
    """Below the ranks, which replicas there was no room for; returns where the legend may begin."""
    y = max(box.y + box.height for box in boxes) + PAD + 34
    if len(boxes) == mesh.size:
        return y
    first, last = mesh.coordinates(len(boxes))["dp"], mesh.shape["dp"] - 1
    text = f"Replicas {first} to {last} (ranks {len(boxes)} to {mesh.size - 1}) lie the same way."
    sheet.text(MARGIN, y, text, 12, MUTED)
    return y + 24


def _draw_line(sheet: Sheet, axis: str, said: str, y: float, width: float) -> float:
    """One axis in the legend: its line and its words; returns where the next may begin."""
    colour, dash = LINES[axis]
    sheet.line(MARGIN, y - 4, MARGIN + 34, y - 4, colour, width, dash)
    for number, line in enumerate(wrapped(said, 12, WIDTH - 2 * MARGIN - 46)):
        sheet.text(MARGIN + 46, y + 16 * number, line, 12, INK if number == 0 else MUTED)
        end = y + 16 * number
    return end + 24
