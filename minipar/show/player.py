"""The player of an animation: the part that runs in the browser, without a kernel and without anything from elsewhere.

Idea    The finished picture is there from the start; the player only draws a veil over what is still to come, outlines
        what each rank does now, and moves a dot along each message. So without JavaScript, or printed, it is still the
        whole picture. All that it needs is in the attribute `data-step` of its element, as JSON.
Read    `animation.py` before, which writes that element.
"""

from __future__ import annotations

STYLE = """
.minipar-player{background:#fff;color:#1f2328;font:13px system-ui,'Segoe UI',Roboto,'Liberation Sans',Arial,sans-serif}
.minipar-player .controls{display:flex;flex-wrap:wrap;gap:8px 12px;align-items:center;padding:6px 16px 2px}
.minipar-player .controls[hidden]{display:none}
.minipar-player button{min-width:88px;padding:5px 12px;font:inherit;font-weight:600;color:#fff;background:#2b66a8;
border:1px solid #1d4a7c;border-radius:5px;cursor:pointer}
.minipar-player input{flex:1 1 200px;min-width:120px;height:24px;accent-color:#8a3ffc}
.minipar-player output{min-width:110px;font-variant-numeric:tabular-nums}
.minipar-player select{font:inherit;padding:3px;color:#1f2328;background:#fff}
.minipar-player .now{min-height:1.5em;margin:0;padding:2px 16px 10px;color:#57606a;font-variant-numeric:tabular-nums}
.minipar-player :focus-visible{outline:3px solid #8a3ffc;outline-offset:2px}
"""

SCRIPT = """
document.querySelectorAll(".minipar-player:not([data-ready])").forEach(root => {
  root.dataset.ready = "yes";
  const step = JSON.parse(root.dataset.step), find = name => root.querySelector(name);
  const button = find("button"), slider = find("input"), clock = find("output"), speed = find("select");
  const now = find(".now"), dots = find(".dots"), veil = find(".veil"), head = find(".playhead");
  const marks = [...root.querySelectorAll(".current")];
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let time = step.seconds, playing = false, last = 0;

  const x = t => step.left + (step.right - step.left) * t / step.seconds;
  const say = t => `${+(t * step.per_second).toPrecision(3)} ${step.unit}`;
  const set = (mark, values) => Object.entries(values).forEach(([key, value]) => mark.setAttribute(key, value));

  function draw() {
    set(veil, {x: x(time), width: Math.max(step.right - x(time) + 1, 0)});
    set(head, {x1: x(time), x2: x(time)});
    let busy = 0;
    const doing = marks.map((mark, rank) => {
      const row = step.rows[rank];
      row.forEach(([start, end]) => busy += Math.max(0, Math.min(end, time) - start));
      const span = row.find(([start, end]) => start <= time && time < end);
      mark.style.display = span ? "" : "none";
      if (span) set(mark, {x: x(span[0]), width: Math.max(x(span[1]) - x(span[0]), 1)});
      return `rank ${rank} ${span ? span[2] : "idle"}`;
    });
    const flying = step.messages.filter(([start, end]) => start <= time && time < end);
    while (dots.childNodes.length < flying.length) {
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      set(dot, {r: 5, fill: "#8a3ffc", stroke: "#fff", "stroke-width": 1.5});
      dots.append(dot);
    }
    [...dots.childNodes].forEach((dot, i) => {
      dot.style.display = i < flying.length ? "" : "none";
      if (i >= flying.length) return;
      const [start, end, from, to] = flying[i];
      set(dot, {cx: x(time), cy: from + (to - from) * (time - start) / (end - start)});
    });
    const share = busy ? (100 * (marks.length * time - busy) / busy).toFixed(1).replace(".0", "") : "0";
    const what = marks.length > 8 ? "" : `: ${doing.join(", ")}`;
    now.textContent = time >= step.seconds ? `The step is done: idle ${share} % of busy time`
      : `At ${say(time)}${what}; so far idle ${share} % of busy time`;
    slider.value = time;
    clock.textContent = `${say(time)} of ${say(step.seconds)}`;
    if (!playing) slider.setAttribute("aria-valuetext", now.textContent);
  }
  function seek(t) {
    time = Math.min(Math.max(t, 0), step.seconds);
    draw();
  }
  function play(on) {
    if (on && time >= step.seconds) time = 0;
    playing = on;
    button.textContent = on ? "Pause" : "Play";
    last = performance.now();
    draw();
    if (on) requestAnimationFrame(frame);
  }
  function frame(moment) {
    if (!playing || !root.isConnected) return;
    time += Math.max(moment - last, 0) / 1000 * speed.value * step.seconds / step.lasts;
    last = moment;
    if (time >= step.seconds) { time = step.seconds; return play(false); }
    draw();
    requestAnimationFrame(frame);
  }
  button.addEventListener("click", () => play(!playing));
  slider.addEventListener("input", () => { const to = +slider.value; play(false); seek(to); });
  root.addEventListener("keydown", event => {
    const plain = event.target === slider || event.target === root;
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === " " && plain) play(!playing);
    else if (move && event.target !== speed) { play(false); seek(time + move * step.jump); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  find(".controls").hidden = false;
  if (still) { play(false); seek(0); return; }
  seek(0);
  if (step.autoplay) new IntersectionObserver((seen, watcher) => {
    if (seen.some(entry => entry.isIntersecting)) { watcher.disconnect(); play(true); }
  }, {threshold: 0.5}).observe(root);
});
"""
