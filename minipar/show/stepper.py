"""Pictures one after another, with buttons: what happens in a few steps, at the reader's own pace.

Idea    All pictures are in the page already; a few lines of script show one of them. Without script, all are seen, one
        below the other. Buttons, the slider and the arrow keys do the same.
Cost    The pictures, and 1 kB of script.
Read    `animation.py` for what moves continuously.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from minipar.show.drawing import Drawing, page

STYLE = (
    ".minipar-steps{outline:none;max-width:1000px}.minipar-steps:focus-visible{outline:3px solid #8a3ffc}"
    ".minipar-steps .controls{display:flex;gap:12px;align-items:center;flex-wrap:wrap;padding:6px 16px;"
    "font:14px system-ui,sans-serif;color:#1f2328}.minipar-steps .controls[hidden]{display:none}"
    ".minipar-steps button{min-width:80px;padding:5px 12px;font:inherit;font-weight:600;color:#fff;background:#2b66a8;"
    "border:1px solid #1d4a7c;border-radius:5px;cursor:pointer}.minipar-steps button:disabled{opacity:.4}"
    ".minipar-steps input{flex:1 1 160px;min-width:100px;height:24px;accent-color:#8a3ffc}"
    ".minipar-steps figcaption{padding:2px 16px 8px;font:14px system-ui,sans-serif;color:#1f2328;min-height:1.5em}"
    ".minipar-steps figure{margin:0}"
)
SCRIPT = """
document.querySelectorAll(".minipar-steps:not([data-ready])").forEach(root => {
  root.dataset.ready = "yes";
  const frames = [...root.querySelectorAll("figure")], [back, on] = root.querySelectorAll("button");
  const slider = root.querySelector("input"), count = root.querySelector("output");
  let shown = 0;
  function show(number) {
    shown = Math.min(Math.max(number, 0), frames.length - 1);
    frames.forEach((frame, i) => frame.hidden = i !== shown);
    slider.value = shown;
    slider.setAttribute("aria-valuetext", frames[shown].querySelector("figcaption").textContent);
    count.textContent = `${shown + 1} of ${frames.length}`;
    back.disabled = shown === 0;
    on.disabled = shown === frames.length - 1;
  }
  back.addEventListener("click", () => show(shown - 1));
  on.addEventListener("click", () => show(shown + 1));
  slider.addEventListener("input", () => show(+slider.value));
  root.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    show(shown + move);
    event.preventDefault();
    event.stopPropagation();
  });
  root.querySelector(".controls").hidden = false;
  show(0);
});
"""


@dataclass(frozen=True, repr=False)
class Steps(Drawing):
    """A drawing in steps: `html` shows them one at a time; `svg` is the last."""

    html: str

    def _repr_html_(self) -> str:
        return self.html

    def to_html(self) -> bytes:
        return page(self.title, self.html).encode()


def steps(drawings: Sequence[Drawing], captions: Sequence[str] | None = None, *, title: str = "") -> Steps:
    """The drawings, one at a time; each has a caption, its title by default. Raises `ValueError` if there are none, or
    not as many captions."""
    said = [drawing.title for drawing in drawings] if captions is None else list(captions)
    if not drawings or len(said) != len(drawings):
        raise ValueError(f"{len(drawings)} drawings and {len(said)} captions: give at least one, and one for each")
    frames = "".join(
        f"<figure>{drawing.svg}<figcaption>{escape(text)}</figcaption></figure>"
        for drawing, text in zip(drawings, said, strict=True)
    )
    title = title or drawings[-1].title
    controls = (
        '<div class="controls" hidden><button type="button">Back</button><button type="button">Next</button>'
        f'<input type="range" min="0" max="{len(drawings) - 1}" step="1" value="0" aria-label="step"><output></output>'
        "</div>"
    )
    html = (
        f'<div class="minipar-steps" tabindex="0" role="group" aria-label="{escape(title, quote=True)}">'
        f"<style>{STYLE}</style>{controls}{frames}<script>{SCRIPT}</script></div>"
    )
    words = " ".join(f"Step {number}: {text.rstrip('.')}." for number, text in enumerate(said, 1))
    return Steps(drawings[-1].svg, title, words, html)
