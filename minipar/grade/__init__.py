"""Exercises, graded: an answer runs on real ranks, and what it did is judged where it cannot reach.

Idea    The ranks that run an answer are processes with nothing but a socket to the grader. Every message goes through
        the grader's switch (`switch.py`), which carries out the collectives itself: so calls, bytes and their order are
        seen from outside, a deadlock is known at once, and no answer can claim what it did not do. What ranks hand back
        are plain numbers and tensors; truth is computed only here.

    frames.py     numbers and tensors on a socket, in a form that cannot execute code
    ranks.py      in the answer's process: the groups that an answer calls
    switch.py     in the grader: carries messages, and sees who waits for whom
    nursery.py    where the answer's processes come from, and what they may not do
    trial.py      one case: start ranks, carry their messages, gather what they hand back

Read    `frames.py` first.
"""
