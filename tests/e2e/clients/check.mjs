// Calls a cluster as programs do that are not written in Python: the `openai` client for Node, and the requests that
// Open WebUI 0.12.4 sends (its routers/openai.py and routers/tasks.py). Exits with 1 if a reply is not as promised.
// Usage: node check.mjs URL KEY MODEL

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, key, model] = process.argv.slice(2);
const messages = [
  { role: "system", content: "You write Python." },
  { role: "user", content: "Complete this Python code:\ndef get_name(self):" },
];
const wish = { model, messages, max_tokens: 24, temperature: 0 };
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });

async function clientForNode() {
  const listed = [];
  for await (const each of client.models.list()) listed.push(each.id);
  assert.deepEqual(listed, [model]);

  const whole = await client.chat.completions.create(wish);
  const stream = client.chat.completions.stream({ ...wish, stream_options: { include_usage: true } });
  const parts = [];
  for await (const chunk of stream) parts.push(chunk.choices[0]?.delta.content ?? "");
  const answer = whole.choices[0].message.content;
  assert.ok(answer.length > 0);
  assert.equal(parts.join(""), answer);
  assert.equal(await stream.finalContent(), answer);
  assert.equal((await stream.totalUsage()).total_tokens, whole.usage.total_tokens);

  const response = await client.responses.create({ model, input: messages, max_output_tokens: 24, temperature: 0 });
  assert.equal(response.output_text, answer);

  const parameters = { type: "object", properties: { color: { enum: ["red", "blue"] } }, required: ["color"] };
  const tools = [{ type: "function", function: { name: "paint", parameters: { ...parameters, additionalProperties: false } } }];
  const named = { type: "function", function: { name: "paint" } };
  const called = await client.chat.completions.create({ ...wish, max_tokens: 200, tools, tool_choice: named });
  const [call] = called.choices[0].message.tool_calls;
  assert.ok(["red", "blue"].includes(JSON.parse(call.function.arguments).color));
  const next = [...messages, called.choices[0].message, { role: "user", content: "Go on." }]; // the call has no text
  const after = await client.chat.completions.create({ ...wish, tools, messages: next });
  assert.ok(after.usage.completion_tokens > 0);

  await assert.rejects(client.embeddings.create({ model, input: "x" }), (error) => error.status >= 400 && /embed/i.test(error.message));
  await assert.rejects(client.chat.completions.create({ ...wish, model: "gpt-9" }), OpenAI.NotFoundError);
  await assert.rejects(new OpenAI({ baseURL: `${url}/v1`, apiKey: "guess", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);
  return answer;
}

async function openWebUI(answer) {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  const listed = await (await fetch(`${url}/v1/models`, { headers })).json();
  assert.equal(listed.object, "list");
  assert.equal(listed.data[0].id, model);

  const ask = (body, signal) =>
    fetch(`${url}/v1/chat/completions`, { method: "POST", headers, signal, body: JSON.stringify({ ...wish, ...body }) });
  const chat = await ask({ stream: true, stream_options: { include_usage: true } });
  assert.match(chat.headers.get("content-type"), /^text\/event-stream/);
  const events = (await chat.text()).split("\n\n").filter(Boolean).map((each) => each.replace(/^data: /, ""));
  assert.equal(events.pop(), "[DONE]");
  assert.equal(events.map((each) => JSON.parse(each).choices[0]?.delta.content ?? "").join(""), answer);

  // A title, tags or follow-up questions: a chat without a stream. A stopped answer that goes on: with the partial answer last.
  const title = await (await ask({ stream: false, max_tokens: undefined, max_completion_tokens: 16 })).json();
  assert.ok(title.choices[0].message.content.length > 0);
  const begun = { role: "assistant", content: answer.slice(0, 8) };
  const rest = await ask({ messages: [...messages, begun], continue_final_message: true, add_generation_prompt: false });
  assert.equal(rest.status, 200);
  const { content } = (await rest.json()).choices[0].message;
  assert.ok(content.startsWith(answer.slice(8)), `${begun.content}|${content} goes on, but not as ${answer}`);

  const stop = new AbortController();
  const long = await ask({ stream: true, max_tokens: 4000, ignore_eos: true }, stop.signal);
  assert.equal(long.status, 200);
  const reader = long.body.getReader();
  for (let parts = 0; parts < 5; parts++) await reader.read(); // the first token comes from the prefill worker
  stop.abort(); // the caller looks whether the worker stops
  await assert.rejects(reader.read());
}

await openWebUI(await clientForNode());
