# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Serves a target with its drafter: OpenAI's `/v1/chat/completions`, and a page with plain and drafted answers side by
side.

    python examples/serve.py --port 8000       # the page is at http://127.0.0.1:8000
    curl http://127.0.0.1:8000/v1/chat/completions -d \
        '{"model": "drafted", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'

Hardware: two CPU cores, after `make setup`.
Minutes: ready in some ten seconds.
Expected: the same text in both columns, the drafted one sooner. With `--dtype bfloat16` both are faster, and may
diverge at near-ties. `--pack` makes both columns faster, `--compile` the drafted one, after some minutes at the start.

The model "plain" decodes without the drafter. An answer is greedy unless `temperature` is above 0. One answer is
generated at a time, others wait. There are no users or passwords: listen on 127.0.0.1 only, or behind a proxy that has
them.
"""

import argparse
import json
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from transformers import set_seed

import hf_falcon
from hf_falcon.commands.generate import Reply
from hf_falcon.commands.models import load_drafter, load_target

MODELS = ("plain", "drafted")
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Plain and drafted</title><link rel="icon" href="data:,">
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
  form { display: flex; gap: .5rem } input { flex: 1 } input, button { font: inherit; padding: .4rem .8rem }
  main { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; margin-top: 1rem }
  section { border: 1px solid #bbb; border-radius: .5rem; padding: .5rem 1rem }
  h2 { font-size: 1rem; margin: 0 } p { white-space: pre-wrap; overflow-wrap: anywhere } small { color: #666 }
</style>
<form id="ask">
  <input id="prompt" value="Why is the sky blue?" aria-label="Prompt"><button id="both">Ask both</button>
</form>
<main>
  <section><h2>Plain</h2><small id="plain-gain"></small><p id="plain"></p></section>
  <section><h2>Drafted</h2><small id="drafted-gain"></small><p id="drafted"></p></section>
</main>
<script>
const at = id => document.getElementById(id);
async function answer(model, content) {
  const messages = [{role: "user", content}];
  const response = await fetch("/v1/chat/completions",
    {method: "POST", body: JSON.stringify({model, messages, stream: true, max_tokens: 128})});
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.getReader(), decoder = new TextDecoder();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const events = (rest + decoder.decode(part.value, {stream: true})).split("\\n\\n");
    rest = events.pop();
    for (const event of events.filter(event => event !== "data: [DONE]")) {
      const chunk = JSON.parse(event.slice("data: ".length));
      at(model).textContent += chunk.choices[0].delta.content ?? "";
      at(model + "-gain").textContent = chunk.gain;
    }
  }
}
// One after the other, or each would slow the other down.
at("ask").onsubmit = async event => {
  event.preventDefault();
  at("both").disabled = true;
  for (const model of ["plain", "drafted"]) at(model).textContent = at(model + "-gain").textContent = "";
  for (const model of ["plain", "drafted"])
    await answer(model, at("prompt").value).catch(error => { at(model).textContent = error.message });
  at("both").disabled = false;
  document.title = "Answered";
};
const asked = new URLSearchParams(location.search).get("prompt");
if (asked) { at("prompt").value = asked; at("ask").requestSubmit(); }
</script>
"""


class Server(ThreadingHTTPServer):
    """Holds the models. One answer at a time."""

    daemon_threads = True

    def __init__(self, address, target, tokenizer, drafter):
        super().__init__(address, Handler)
        self.target, self.tokenizer, self.drafters = target, tokenizer, {"plain": None, "drafted": drafter}
        self.turn = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/":
            self.send("text/html; charset=utf-8", PAGE.encode())
        elif path == "/v1/models":
            self.send_json({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})
        else:
            self.send_json({"error": {"message": f"There is no {path}."}}, 404)

    def do_POST(self):
        if self.path != "/v1/chat/completions":
            return self.send_json({"error": {"message": f"There is no {self.path}."}}, 404)
        try:
            body = json.loads(self.rfile.read(min(abs(int(self.headers["Content-Length"])), 2**20)))
            model, stream, seed = body.get("model", "drafted"), bool(body.get("stream")), int(body.get("seed") or 0)
            if model not in MODELS:
                raise ValueError(f"`model` is {model!r}: choose one of {', '.join(MODELS)}.")
            inputs = self.server.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
            ).to(self.server.target.device)
            temperature = float(body.get("temperature") or 0)
            tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 256)
            if tokens < 1:
                raise ValueError(f"`max_tokens` is {tokens}: give 1 or more.")
            options = {"max_new_tokens": tokens, "do_sample": temperature > 0}
            if temperature > 0:
                options |= {"temperature": temperature, "top_p": float(body.get("top_p") or 1)}
        except Exception as error:
            return self.send_json({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)

        kind = "chat.completion.chunk" if stream else "chat.completion"
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}

        def write(text, end=None):
            if stream:
                choice = {"index": 0, "delta": {"content": text} if end is None else {}, "finish_reason": end}
                event = json.dumps({**head, "choices": [choice], "gain": reply.gain})
                # Where the client has gone, this raises, and the answer ends.
                self.wfile.write(f"data: {event}\n\n".encode())

        if stream:
            self.send("text/event-stream")
        with self.server.turn:
            set_seed(seed)
            reply = Reply(self.server.target, self.server.drafters[model], self.server.tokenizer, write)
            try:
                reply.run(dict(inputs), options)
            except OSError:
                return
        end = "length" if reply.tokens == tokens else "stop"
        if stream:
            write("", end)
            self.wfile.write(b"data: [DONE]\n\n")
            return
        message = {"role": "assistant", "content": reply.text}
        prompt = inputs["input_ids"].shape[1]
        usage = {"prompt_tokens": prompt, "completion_tokens": reply.tokens, "total_tokens": prompt + reply.tokens}
        choice = {"index": 0, "message": message, "finish_reason": end}
        self.send_json({**head, "choices": [choice], "usage": usage, "gain": reply.gain})

    def send_json(self, content, status=200):
        self.send("application/json", json.dumps(content).encode(), status)

    def send(self, kind, content=b"", status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="drafter, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or auto (the fastest on the device)")
    parser.add_argument("--pack", action="store_true", help="pack the weights of both, for a CPU")
    parser.add_argument("--compile", action="store_true", help="compile rounds first, which takes minutes")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    target, tokenizer = load_target(arguments.target, arguments.dtype)
    drafter = load_drafter(arguments.drafter, arguments.dtype)
    if arguments.pack:
        hf_falcon.pack_weights(target)
        hf_falcon.pack_weights(drafter)
    if arguments.compile:
        hf_falcon.compile_rounds(target, drafter=drafter)
    # The first call of a drafter measures the machine.
    inputs = tokenizer("Hello", return_tensors="pt").to(target.device)
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=8)
    with Server(("127.0.0.1", arguments.port), target, tokenizer, drafter) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
