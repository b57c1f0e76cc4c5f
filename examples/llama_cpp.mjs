// Decodes prompts with llama.cpp, for examples/llama_cpp.py: reads lines {"ids": [...]}, writes lines {"tokens", "seconds"}.
//
//   node llama_cpp.mjs PACKAGES MODEL.gguf THREADS TOKENS [LOOKUP_TOKENS | DRAFT_MODEL.gguf]
//
// PACKAGES is the folder that node-llama-cpp is installed in.
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const [packages, file, threads, tokens, speculation] = process.argv.slice(2);
const entry = path.resolve(packages, "node_modules/node-llama-cpp/dist/index.js");
const {getLlama, DraftSequenceTokenPredictor, InputLookupTokenPredictor} = await import(pathToFileURL(entry));

const llama = await getLlama({gpu: false, build: "never", maxThreads: +threads, logLevel: "error"});
const open = async (modelPath) => {
  const model = await llama.loadModel({modelPath});
  const context = await model.createContext({contextSize: 4096, threads: +threads});
  return [model, context];
};
const [model, context] = await open(file);
let tokenPredictor;
if (/^\d+$/.test(speculation ?? "")) {
  tokenPredictor = new InputLookupTokenPredictor({predictionLength: {max: +speculation}});
} else if (speculation) {
  const [, draft] = await open(speculation);
  tokenPredictor = new DraftSequenceTokenPredictor(draft.getSequence());
}
const sequence = context.getSequence({tokenPredictor});
console.log("{}");
for await (const line of readline.createInterface({input: process.stdin})) {
  await sequence.clearHistory();
  const begin = performance.now();
  let written = 0;
  // Greedy.
  for await (const token of sequence.evaluate(JSON.parse(line).ids, {temperature: 0, yieldEogToken: true})) {
    written++;
    if (written >= +tokens || model.isEogToken(token)) break;
  }
  console.log(JSON.stringify({tokens: written, seconds: (performance.now() - begin) / 1000}));
}
process.exit(0);
