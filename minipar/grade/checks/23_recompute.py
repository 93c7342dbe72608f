"""Exercise 23: a function that is computed again in backward instead of kept."""

from typing import Any

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome

TITLE, MINUTES, LESSON = "Compute it again", 30, 7
CHECKS = {
    "the output is the function's": 2,
    "gradients are those of one forward": 4,
    "forward keeps nothing but the inputs": 3,
    "the function runs once more, in backward": 2,
    "random numbers go on as if nothing had been drawn": 2,
}
HINTS = [
    "Write a class of torch.autograd.Function. In its forward autograd records nothing, so just call the function.",
    "ctx.save_for_backward(*inputs), ctx.function = function, ctx.state = torch.get_rng_state() before the call.",
    "In backward: inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]; with "
    "torch.enable_grad(): y = function(*inputs); torch.autograd.backward(y, dy). Weights get their .grad by that too.",
    "Around the second run: note the state of now, set the state of then, run, set the state of now again. Backward "
    "returns None for the function and x.grad for each input.",
]


def harness(student, group, seed, x, side, weights, p):  # type: ignore[no-untyped-def]
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils.checkpoint import checkpoint as theirs

    def refuse(*args, **more):
        raise RuntimeError("torch.utils.checkpoint is what this exercise builds: write it yourself")

    if any(value is theirs for value in vars(student).values()):
        refuse()
    torch.utils.checkpoint.checkpoint = refuse
    leaves = [one.clone().requires_grad_() for one in (x, side, *weights)]
    runs, inner = [], []

    def segment(number):
        weight = leaves[2 + number]

        def function(h, side):
            runs.append([number, torch.is_grad_enabled(), phase])
            a = torch.dropout(torch.tanh(h @ weight), p, True)
            b = torch.sin(a * side)
            inner.extend(StorageWeakRef(one.untyped_storage()) for one in (a, b))
            return b * a

        return function

    torch.manual_seed(seed)
    phase, h = "forward", leaves[0]
    for number in range(len(weights)):
        h = student.checkpoint(segment(number), h, leaves[1])
    kept = sum(not one.expired() for one in inner)
    between = torch.rand(3)
    phase, drawn = "backward", torch.get_rng_state()
    (h**2).sum().backward()
    moved = not torch.equal(drawn, torch.get_rng_state())
    grads = [one.grad for one in leaves]
    return {"y": h.detach(), "grads": grads, "kept": kept, "runs": runs, "between": between, "moved": moved}


def cases(draw: Draw) -> list[Case]:
    return [_case(draw, 2, 0.0), _case(draw, 1, 0.5), _case(draw, draw.integer(3, 4), draw.choice([0.25, 0.5]))]


def _case(draw: Draw, segments: int, p: float) -> Case:
    rows, width = draw.integer(3, 6), draw.integer(4, 8)
    weights = [draw.normal(width, width) for _ in range(segments)]
    inputs = {"x": draw.normal(rows, width), "side": draw.normal(width), "weights": weights, "p": p}
    about = f"{segments} checkpointed function{'s' * (segments > 1)}, dropout {p}"
    return Case([{"seed": draw.integer(0, 10**6), **inputs}], about=about)


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    found, inputs = outcome.values[0], case.inputs[0]
    right, segments = _plain(**inputs), len(inputs["weights"])
    judge.equal("the output is the function's", [found["y"]], [right["y"]], what=f"the output ({case.about})")
    grads: list[Any] = right["grads"]
    judge.equal(
        "gradients are those of one forward",
        [found["grads"]],
        [grads],
        {
            "the weights that the function uses got no gradient: walk the graph with torch.autograd.backward, which "
            "adds to their .grad, and not with grad of the inputs": [[grads[0], grads[1], *[None] * segments]],
            "nothing got a gradient: return one for each input from backward": [[None] * len(grads)],
            "the second input got no gradient: return one for each of the inputs": [[grads[0], None, *grads[2:]]],
            "the gradients are those of another dropout: the second run must draw what the first drew. Set the "
            "generator to the state from before the first": [_plain(**inputs, again="on")["grads"]],
            "all segments ran again with the same random numbers: each needs the state from before its own forward": [
                _plain(**inputs, again="first")["grads"]
            ],
            "the second run draws what came after the first: note the state before you call the function, not after": [
                _plain(**inputs, again="after")["grads"]
            ],
            "the gradients that come from above are left out: the second run's backward begins with dy": [
                _plain(**inputs, ones=True)["grads"]
            ],
        },
        what=f"the list of gradients of x, side and weights ({case.about})",
    )
    judge.that(
        "forward keeps nothing but the inputs",
        not found["kept"],
        f"after forward {found['kept']} of {2 * segments} tensors from inside of the functions are still held: run the "
        "function without a graph, and keep the inputs alone",
    )
    _judge_runs(found["runs"], segments, judge)
    judge.that(
        "random numbers go on as if nothing had been drawn",
        not found["moved"] and bool(torch.equal(found["between"], right["between"])),
        "backward has moved the random generator: note its state before the second run, and set it again afterwards"
        if found["moved"]
        else "forward has left the random generator where it does not belong: the first run just draws, as usual",
    )


def _judge_runs(runs: list[list[Any]], segments: int, judge: Judge) -> None:
    forward = [number for number, _, phase in runs if phase == "forward"]
    again = [number for number, _, phase in runs if phase == "backward"]
    if not again:
        why = "the function never runs in backward: so its graph was kept from forward on"
    elif len(forward) > segments or len(again) > segments:
        why = f"they run {len(forward)} times in forward and {len(again)} times in backward: once each is enough"
    else:
        why = "in backward the functions run in another order than last to first"
    fine = forward == list(range(segments)) and again == list(reversed(range(segments)))
    judge.that("the function runs once more, in backward", fine, why)


def _plain(seed: int, x: Tensor, side: Tensor, weights: list[Tensor], p: float, again: str = "", ones: bool = False):  # type: ignore[no-untyped-def]
    """With everything kept. `again`: gradients as if the functions had drawn other numbers when they ran again."""
    leaves = [one.clone().requires_grad_() for one in (x, side, *weights)]
    torch.manual_seed(seed)
    states, hs, h = [], [], leaves[0]
    for weight in leaves[2:]:
        states.append(torch.get_rng_state())
        hs.append(h.detach().requires_grad_())
        h = _segment(h, leaves[1], weight, p)
    states.append(torch.get_rng_state())
    between, y = torch.rand(3), h.detach()
    dy = 2 * y
    for number in reversed(range(len(weights))):
        state = {"first": states[0], "after": states[number + 1], "": states[number]}.get(again)
        if state is not None:
            torch.set_rng_state(state)
        dy = torch.ones_like(dy) if ones else dy
        _segment(hs[number], leaves[1], leaves[2 + number], p).backward(dy)
        dy = hs[number].grad
    return {"y": y, "grads": [dy, *(leaf.grad for leaf in leaves[1:])], "between": between}


def _segment(h: Tensor, side: Tensor, weight: Tensor, p: float) -> Tensor:
    a = torch.dropout(torch.tanh(h @ weight), p, True)
    return torch.sin(a * side) * a
