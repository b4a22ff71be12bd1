// Vercel's AI SDK against a running server: node ai_sdk.mjs --base-url http://...
// The same scenarios over Responses, chat and Messages, each through the provider made for it.
import assert from "node:assert/strict";
import { parseArgs } from "node:util";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const { values } = parseArgs({
  options: { "base-url": { type: "string" }, model: { type: "string", default: "demo" } },
});
const baseURL = `${values["base-url"]}/v1`;
const settings = { baseURL, apiKey: "none" };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({
  ...settings,
  name: "slipstream",
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const models = {
  responses: openai.responses(values.model),
  chat: openai.chat(values.model),
  compatible: compatible(values.model),
  messages: createAnthropic(settings)(values.model),
};
const question = "What is the capital of France?";
const weather = "What is the weather in Paris?";
const tools = {
  get_weather: tool({
    description: "Get the current weather in a city.",
    inputSchema: z.object({ city: z.string().max(40) }),
    execute: async ({ city }) => ({ city, temperature_c: 18, condition: "sunny" }),
  }),
  calculator: tool({
    description: "Evaluate an arithmetic expression.",
    inputSchema: z.object({ expression: z.string().max(40) }),
    execute: async ({ expression }) => ({ expression, result: 408 }),
  }),
};
// For a model whose name it does not know, @ai-sdk/anthropic would make a forced tool of an object.
const anthropic = { structuredOutputMode: "outputFormat" };
const common = { temperature: 0, maxRetries: 0, providerOptions: { anthropic } };

async function text(model) {
  const answer = await generateText({ ...common, model, prompt: question });
  assert.match(answer.text, /Paris/);
  assert.equal(answer.finishReason, "stop");
  assert.ok(answer.usage.inputTokens > 0 && answer.usage.outputTokens > 0);
}

async function stream(model) {
  const answer = streamText({ ...common, model, prompt: question });
  let whole = "";
  for await (const piece of answer.textStream) whole += piece;
  assert.match(whole, /Paris/);
  assert.ok((await answer.usage).outputTokens > 0);
}

async function loop(model) {
  const stopWhen = stepCountIs(4);
  const answer = await generateText({ ...common, model, tools, prompt: weather, stopWhen });
  assert.deepEqual(
    answer.steps.map((step) => step.toolCalls.map((call) => call.toolName)),
    [["get_weather"], []],
  );
  assert.deepEqual(answer.steps[0].toolCalls[0].input, { city: "Paris" });
  assert.match(answer.text, /18/);
}

async function streamedLoop(model) {
  const stopWhen = stepCountIs(4);
  const answer = streamText({ ...common, model, tools, prompt: "What is 12 * 34?", stopWhen });
  const kinds = [];
  for await (const part of answer.fullStream) kinds.push(part.type);
  assert.ok(kinds.includes("tool-call") && kinds.includes("tool-result"), kinds.join());
  assert.ok(!kinds.includes("error"), kinds.join());
  assert.match(await answer.text, /408/);
}

const person = Output.object({ schema: z.object({ name: z.string().max(40), age: z.number().int() }) });

async function object(model) {
  const answer = await generateText({ ...common, model, output: person, prompt: "Anna is 29 years old." });
  assert.deepEqual(answer.output, { name: "Anna", age: 29 });
}

const report = Output.object({
  schema: z.object({ city: z.string().max(40), temperature_c: z.number().int() }),
});

async function objectLoop(model) {
  const stopWhen = stepCountIs(4);
  const answer = await generateText({ ...common, model, tools, output: report, prompt: weather, stopWhen });
  assert.equal(answer.steps.length, 2);
  assert.deepEqual(answer.output, { city: "Paris", temperature_c: 18 });
}

// The server keeps the conversation, and items are referred to by their ids.
async function goesOn(model) {
  const first = await generateText({ ...common, model, prompt: question });
  const { responseId } = first.providerMetadata.openai;
  const second = await generateText({
    ...common,
    model,
    prompt: "And of Italy?",
    providerOptions: { openai: { previousResponseId: responseId } },
  });
  assert.match(second.text, /Rome/);
  const messages = [
    { role: "user", content: question },
    ...first.response.messages,
    { role: "user", content: "And of Italy?" },
  ];
  const third = await generateText({ ...common, model, messages });
  assert.match(third.text, /Rome/);
}

for (const [api, model] of Object.entries(models)) {
  for (const scenario of [text, stream, loop, streamedLoop, object, objectLoop]) {
    await scenario(model);
    console.log(`ok ${api} ${scenario.name}`);
  }
}
await goesOn(models.responses);
console.log("ok responses goesOn");
