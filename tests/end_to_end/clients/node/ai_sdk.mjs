// Asks a stack by each provider of the package `ai`, and prints a line of JSON for each question:
// what came whole, and what the accumulated stream had.
//
//     node ai_sdk.mjs URL MODEL

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, model] = process.argv.slice(2);
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({
  ...settings,
  name: "twinfang",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = {
  "openai-compatible": compatible(model),
  "openai-compatible completions": compatible.completionModel(model),
  "openai chats": openai.chat(model),
  "openai responses": openai.responses(model),
  anthropic: createAnthropic(settings)(model),
};

const trip = jsonSchema({
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
});
const bookTrip = tool({
  description: "Books it.",
  inputSchema: trip,
  execute: ({ city, days }) => `${days} days in ${city} are booked`,
});
const prompt = "Which city, and for how many days?";
const limits = { temperature: 0, maxRetries: 0 };
const oneCall = {
  openai: { parallelToolCalls: false },
  twinfang: { parallel_tool_calls: false },
  anthropic: { disableParallelToolUse: true },
};
const questions = {
  text: { prompt, maxOutputTokens: 24 },
  object: { prompt, maxOutputTokens: 200, output: Output.object({ schema: trip }) },
  tool: {
    prompt,
    maxOutputTokens: 200,
    tools: { bookTrip },
    providerOptions: oneCall,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  },
};

// What both ways of asking promise; ids differ from answer to answer.
async function facts(result, question) {
  const steps = await result.steps;
  const usage = await result.totalUsage;
  return {
    text: await result.text,
    finishReason: await result.finishReason,
    usage: [usage.inputTokens, usage.outputTokens],
    calls: steps.flatMap((step) => step.toolCalls.map((call) => call.input)),
    results: steps.flatMap((step) => step.toolResults.map((made) => made.output)),
    object: question === "object" ? await result.output : null,
  };
}

for (const [provider, languageModel] of Object.entries(models)) {
  for (const [question, asked] of Object.entries(questions)) {
    if (provider.endsWith("completions") && question !== "text") continue;
    const fields = { ...limits, ...asked, model: languageModel };
    const whole = await facts(await generateText(fields), question);
    const errors = [];
    const stream = streamText({ ...fields, onError: ({ error }) => errors.push(String(error)) });
    let pieces = "";
    for await (const piece of stream.textStream) pieces += piece;
    const streamed = errors.length ? { errors } : await facts(stream, question);
    console.log(JSON.stringify({ provider, question, whole, streamed, pieces }));
  }
}
