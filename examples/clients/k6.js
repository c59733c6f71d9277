// Load on a Twinfang router with k6: chats and completions, each whole and as a stream.
//
//     k6 run --no-usage-report --env URL=http://127.0.0.1:8000 examples/clients/k6.js
//
// The run fails (exit status 99) if any request fails or any answer lacks what the API promises. k6 has no
// streaming of its own: it hands over the events of a stream once the last one is there.
import http from 'k6/http';
import { check } from 'k6';
import { Counter } from 'k6/metrics';

const URL = __ENV.URL || 'http://127.0.0.1:8000';
const MODEL = __ENV.MODEL || 'bundled_model';
const HEADERS = { 'Content-Type': 'application/json' };
if (__ENV.API_KEY) {
  HEADERS.Authorization = `Bearer ${__ENV.API_KEY}`;
}

const MAX_TOKENS = 32;
const completionTokens = new Counter('completion_tokens');

export const options = {
  scenarios: {
    clients: {
      executor: 'shared-iterations',
      vus: Number(__ENV.VUS || 8),
      iterations: Number(__ENV.ITERATIONS || 50),
    },
  },
  thresholds: { checks: ['rate==1'], http_req_failed: ['rate==0'] },
};

function ask(path, fields) {
  const body = { model: MODEL, max_tokens: MAX_TOKENS, temperature: 0, ...fields };
  return http.post(`${URL}${path}`, JSON.stringify(body), { headers: HEADERS, tags: { name: path } });
}

// The JSON objects of a stream; the last line before its end is not one of them, it is [DONE].
function events(response) {
  const lines = response.body.split('\n').filter((line) => line.startsWith('data: '));
  const texts = lines.map((line) => line.slice('data: '.length));
  return { isDone: texts.pop() === '[DONE]', chunks: texts.map((text) => JSON.parse(text)) };
}

function checkWhole(path, fields, textOf) {
  const response = ask(path, fields);
  const isAnswered = check(response, { 'whole: 200': ({ status }) => status === 200 });
  if (!isAnswered) {
    return;
  }
  const { choices, usage } = response.json();
  check(choices[0], {
    'whole: text': (choice) => typeof textOf(choice) === 'string',
    'whole: finish_reason': (choice) => ['stop', 'length'].includes(choice.finish_reason),
  });
  check(usage, {
    'whole: usage adds up': (it) => it.total_tokens === it.prompt_tokens + it.completion_tokens,
  });
  completionTokens.add(usage.completion_tokens);
}

function checkStream(path, fields, textOf) {
  const response = ask(path, { ...fields, stream: true, stream_options: { include_usage: true } });
  const isAnswered = check(response, {
    'stream: 200': ({ status }) => status === 200,
    'stream: content type': ({ headers }) => headers['Content-Type'].startsWith('text/event-stream'),
  });
  if (!isAnswered) {
    return;
  }
  const { isDone, chunks } = events(response);
  const pieces = chunks.flatMap(({ choices }) => choices);
  const { usage } = chunks[chunks.length - 1];
  check(pieces, {
    'stream: ends with [DONE]': () => isDone,
    'stream: text': (all) => all.some((choice) => textOf(choice)),
    'stream: one finish_reason': (all) => all.filter((choice) => choice.finish_reason).length === 1,
    'stream: usage at its end': () => usage !== null && usage.completion_tokens > 0,
  });
  completionTokens.add(usage.completion_tokens);
}

export default function () {
  const chat = { messages: [{ role: 'user', content: `${__ITER} + 4 =` }] };
  checkWhole('/v1/chat/completions', chat, ({ message }) => message.content);
  checkStream('/v1/chat/completions', chat, ({ delta }) => delta.content);
  const completion = { prompt: `def fibonacci(n, depth=${__ITER}):` };
  checkWhole('/v1/completions', completion, ({ text }) => text);
  checkStream('/v1/completions', completion, ({ text }) => text);
}
