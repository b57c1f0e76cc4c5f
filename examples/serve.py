# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A page for the server of `hf-falcon serve`: the same answer, plain and drafted, side by side. Words that arrive
together, within 15 milliseconds, are marked: the target checked them in one forward pass.

    python examples/serve.py --port 8000       # the page is at http://127.0.0.1:8000

Hardware: two CPU cores, after `make setup` and `pip install "hf-falcon[serve]"`.
Minutes: ready in some ten seconds.
Expected: the same text in both columns, the drafted one sooner. With `--dtype bfloat16` both are faster, and may
diverge at near-ties.

The drafted target answers at `/v1`, and a copy of it without a drafter at `/plain/v1`. There are no users or
passwords: listen on 127.0.0.1 only, or behind a proxy that has them.
"""

import argparse
import copy
import socket

import hf_falcon
from hf_falcon.commands.models import TARGET_NAME, load_drafter, load_target
from hf_falcon.commands.serving import TargetServer

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Plain and drafted</title><link rel="icon" href="data:,">
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
  form { display: flex; gap: .5rem } input { flex: 1 } input, button { font: inherit; padding: .4rem .8rem }
  main { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; margin-top: 1rem }
  section { border: 1px solid #bbb; border-radius: .5rem; padding: .5rem 1rem }
  h2 { font-size: 1rem; margin: 0 } p { white-space: pre-wrap; overflow-wrap: anywhere } small { color: #666 }
  .together { background: #d5ecd5; border-right: 2px solid #fff }
</style>
<form id="ask">
  <input id="prompt" value="Why is the sky blue?" aria-label="Prompt"><button id="both">Ask both</button>
</form>
<main>
  <section><h2>Plain</h2><small id="plain-gain"></small><p id="plain"></p></section>
  <section><h2>Drafted</h2><small id="drafted-gain"></small><p id="drafted"></p></section>
</main>
<script>
const at = id => document.getElementById(id), paths = {plain: "/plain/v1", drafted: "/v1"};
async function answer(column, content) {
  const body = JSON.stringify({messages: [{role: "user", content}], stream: true, max_tokens: 128, temperature: 0});
  const start = performance.now();
  const response = await fetch(paths[column] + "/chat/completions",
    {method: "POST", headers: {"Content-Type": "application/json"}, body});
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let tokens = 0, steps = 0, piece, last = 0;
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const events = (rest + decoder.decode(part.value, {stream: true})).split("\\n\\n");
    rest = events.pop();
    const chunks = events.map(event => JSON.parse(event.slice("data: ".length)));
    const failed = chunks.find(chunk => chunk.error);
    if (failed) throw new Error(failed.error);
    for (const text of chunks.map(chunk => chunk.choices[0].delta.content).filter(text => text)) {
      if (piece && performance.now() - last < 15) {
        piece.className = "together";
        piece.textContent += text;
      } else {
        piece = document.createElement("span");
        piece.textContent = text;
        at(column).append(piece);
        steps += 1;
      }
      last = performance.now();
      tokens += 1;
    }
    tokens = chunks.find(chunk => chunk.usage)?.usage.completion_tokens ?? tokens;
    const speed = tokens / (performance.now() - start) * 1000;
    at(column + "-gain").textContent = `${tokens} tokens, ${speed.toFixed(1)} tokens/s`;
    if (column === "drafted" && steps)
      at(column + "-gain").textContent += `, ${(tokens / steps).toFixed(2)} at a time`;
  }
}
// One after the other, or each would slow the other down.
at("ask").onsubmit = async event => {
  event.preventDefault();
  at("both").disabled = true;
  for (const column in paths) at(column).textContent = at(column + "-gain").textContent = "";
  for (const column in paths)
    await answer(column, at("prompt").value).catch(error => { at(column).textContent = error.message });
  at("both").disabled = false;
  document.title = "Answered";
};
const asked = new URLSearchParams(location.search).get("prompt");
if (asked) { at("prompt").value = asked; at("ask").requestSubmit(); }
</script>
"""


def make_server(target, tokenizer, drafter, name):
    """The server of `hf-falcon serve`, the page, and a second server inside it, whose target drafts nothing."""
    from fastapi.responses import HTMLResponse

    # A copy with the same tensors. A drafter that is attached to the target is not attached to the copy.
    plain = copy.deepcopy(target, {id(tensor): tensor for tensor in (*target.parameters(), *target.buffers())})
    hf_falcon.attach(target, drafter)
    server = TargetServer(target, tokenizer, name)
    server.app.mount("/plain", TargetServer(plain, tokenizer, name).app)
    server.app.get("/", response_class=HTMLResponse)(lambda: PAGE)
    return server


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="drafter, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or auto (the fastest on the device)")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    target, tokenizer = load_target(arguments.target, arguments.dtype)
    drafter = load_drafter(arguments.drafter, arguments.dtype)
    server = make_server(target, tokenizer, drafter, arguments.target or TARGET_NAME)
    # The first call of a drafter learns what rounds cost.
    server.generate(**tokenizer("Hello", return_tensors="pt").to(target.device), max_new_tokens=64)
    with socket.create_server(("127.0.0.1", arguments.port)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        try:
            server.run(listener)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
