"""Exercise 15: a loop that runs the schedule of a pipeline on real ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, bytes_of, calls_of
from minipar.schedule import gpipe, one_f_one_b

TITLE, MINUTES, LESSON = "An executor for pipelines", 30, 4
ORDER, VALUES, GRADIENTS = "every rank takes its actions in order", "activations arrive", "gradients arrive"
MESSAGES, ASYNC = "only neighbours' messages, no more than needed", "no send blocks"
CHECKS = {ORDER: 2, VALUES: 2, GRADIENTS: 2, MESSAGES: 3, ASYNC: 2}
HINTS = [
    'For each action: what must have arrived before it, and who waits for its result? "F3"[0] is the kind, '
    'int("F3"[1:]) the micro-batch.',
    "A receive may block, since nothing can be done without it. A send need not: nothing of this rank depends on it.",
    "Keep what send(..., async_op=True) returns in a list, and wait for all of it after the last action, not before.",
    "Receive into torch.empty_like(like), a new one each time; on the first rank a forward gets None, on the last rank "
    "a backward does.",
]


def harness(student, group, actions, weight, begin, end):  # type: ignore[no-untyped-def]
    kept, done, left = {}, [], {}
    like = torch.zeros(5, weight.shape[0], dtype=weight.dtype)
    weight = weight.clone().requires_grad_()

    def given(name, number, tensor, own, what):  # type: ignore[no-untyped-def]
        if own is not None:
            if tensor is not None:
                raise ValueError(f"{name} on rank {group.rank} got a tensor: pass None, it has {what} of its own")
            return own[number]
        if type(tensor) is not torch.Tensor:
            raise ValueError(f"{name} on rank {group.rank} got {type(tensor).__name__}: it needs the {what}, received")
        if tensor.shape != like.shape:
            raise ValueError(f"{name} on rank {group.rank} got {tuple(tensor.shape)}, wants {tuple(like.shape)}")
        return tensor.detach().clone()

    def forward(number, x):  # type: ignore[no-untyped-def]
        done.append(f"F{number}")
        x = given(f"forward of micro-batch {number}", number, x, begin, "activations").requires_grad_()
        y = torch.tanh(x @ weight)
        kept[number] = x, y
        left[number] = y.detach().clone()
        return y.detach()

    def backward(number, grad):  # type: ignore[no-untyped-def]
        done.append(f"B{number}")
        grad = given(f"backward of micro-batch {number}", number, grad, end, "gradient")
        x, y = kept.pop(number)
        (y * grad).sum().backward()
        return x.grad

    student.execute(list(actions), forward, backward, like, group)
    zero = torch.zeros_like(weight)
    left = torch.stack([left[number] for number in sorted(left)]) if left else None
    return {"done": done, "left": left, "weight": zero if weight.grad is None else weight.grad}


def cases(draw: Draw) -> list[Case]:
    sizes = [(3, draw.integer(2, 4), gpipe), (2, draw.integer(3, 5), one_f_one_b)]
    sizes += [(draw.choice([4, 5]), draw.integer(4, 6), one_f_one_b)]
    some = []
    for size, micro_batches, make in sizes:
        name = "1F1B" if make is one_f_one_b else "GPipe"
        rows = [[str(action) for action in row] for row in make(size, micro_batches).actions]
        width = draw.integer(3, 5)
        x, grad = draw.normal(micro_batches, 5, width), draw.normal(micro_batches, 5, width)
        inputs = [
            {
                "actions": row,
                "weight": draw.normal(width, width),
                "begin": x if rank == 0 else None,
                "end": grad if rank == size - 1 else None,
            }
            for rank, row in enumerate(rows)
        ]
        some.append(Case(inputs, about=f"{name} on {size} ranks with {micro_batches} micro-batches"))
    return some


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    for rank, inputs in enumerate(case.inputs):
        done = outcome.values[rank]["done"]
        judge.that(
            ORDER,
            done == inputs["actions"],
            f"{case.about}: rank {rank} was to do {' '.join(inputs['actions'])}, and did {' '.join(done) or 'nothing'}",
        )
        _messages(case, outcome, rank, judge)
    left, grads = _truth(case)
    found = [value["left"] for value in outcome.values]
    what = f"{case.about}: what leaves the stage"
    judge.equal(VALUES, found, left, {
        "every forward after the first rank got zeros: the receive must be done before its buffer is read":
            _forwards(case, [torch.zeros_like(case.inputs[0]["begin"])] * case.size),
        "a rank computes with the last activations that came, whatever their micro-batch: receive right before each "
        "forward, into a buffer of its own": _forwards(case, [one[[-1] * len(one)] for one in _inputs(case)]),
    }, what=what)  # fmt: skip
    weights = [value["weight"] for value in outcome.values]
    judge.equal(GRADIENTS, weights, grads, {
        "only the last stage has a gradient: send what backward returns to the stage before":
            [torch.zeros_like(one) for one in grads[:-1]] + grads[-1:],
    }, what=f"{case.about}: the gradient of the weight")  # fmt: skip


def _messages(case: Case, outcome: Outcome, rank: int, judge: Judge) -> None:
    actions, last = case.inputs[rank]["actions"], case.size - 1
    calls = calls_of(outcome, rank)
    others = [call for call in calls if call.op not in ("send", "recv")]
    to = [rank + 1 if action[0] == "F" else rank - 1 for action in actions]
    wanted = [peer for peer in to if 0 <= peer <= last]
    sent, found = [call.peer for call in calls if call.op == "send"], bytes_of(outcome, rank)
    size = 5 * case.inputs[0]["weight"].shape[0] * 8
    if others:
        why = f"rank {rank} calls {others[0]}: a message between two neighbours needs no collective, for which all wait"
    elif len(sent) != len(wanted):
        why = f"rank {rank} sends {len(sent)} messages, and its actions have {len(wanted)} results that others need"
    elif found != size * len(wanted):
        why = f"rank {rank} sends {found} bytes in {len(sent)} messages, and a result has {size}"
    else:
        why = f"rank {rank} sends to ranks {sent}, and its results go to {wanted}: send each right after it is there"
    right = not others and sent == wanted and found == size * len(wanted)
    judge.that(MESSAGES, right, f"{case.about}: {why}")
    blocks = [call for call in calls if call.op == "send" and call.waits]
    judge.that(
        ASYNC,
        not blocks,
        f"{case.about}: rank {rank} blocks in {blocks and blocks[0]}. It went well here, but does not in every "
        "schedule: pass async_op=True, and wait when all is done",
    )


def _truth(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """By one process: what leaves each stage, and the gradients of the weights."""
    weights = [inputs["weight"].clone().requires_grad_() for inputs in case.inputs]
    flow, left = case.inputs[0]["begin"], []
    for weight in weights:
        flow = torch.tanh(flow @ weight)
        left.append(flow.detach())
    flow.backward(case.inputs[-1]["end"])
    return left, [weight.grad for weight in weights if weight.grad is not None]


def _inputs(case: Case) -> list[Tensor]:
    """What comes into each stage, by one process."""
    flows = [case.inputs[0]["begin"]]
    for inputs in case.inputs[:-1]:
        flows.append(torch.tanh(flows[-1] @ inputs["weight"]))
    return flows


def _forwards(case: Case, instead: Sequence[Tensor]) -> list[Tensor]:
    """What leaves the stages if all but the first are given this instead."""
    flows = [case.inputs[0]["begin"], *instead[1:]]
    return [torch.tanh(flow @ inputs["weight"]) for flow, inputs in zip(flows, case.inputs, strict=True)]
