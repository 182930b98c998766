// Server-sent events over `fetch`, which can carry a token in a header where `EventSource` cannot.

const RETRY_MS = 1000;
const RETRY_MS_MAX = 15000;

/**
 * Follows a stream forever; after an interruption, it continues with the next message.
 *
 * `url` and `headers()` make the request; `onmessage` receives each message, `onstate` "live", "away" or "refused".
 * Returns a function that ends the stream.
 */
function follow(url, headers, onmessage, onstate) {
  const controller = new AbortController();
  let last = "";
  let retry = RETRY_MS;

  const take = (block) => {
    const data = [];
    for (const line of block.split("\n")) {
      const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line);
      if (field === "data") data.push(value);
      else if (field === "id") last = value;
      else if (field === "retry" && /^\d+$/.test(value)) retry = Number(value);
    }
    if (data.length) onmessage(JSON.parse(data.join("\n")));
  };

  const once = async () => {
    const asked = { Accept: "text/event-stream", ...headers() };
    if (last) asked["Last-Event-ID"] = last;
    const answer = await fetch(url, { headers: asked, cache: "no-store", signal: controller.signal });
    if (answer.status === 401 || answer.status === 404) {
      onstate("refused");
      controller.abort();
      return;
    }
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    onstate("live");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const blocks = buffer.split("\n\n");
      buffer = blocks.pop();
      blocks.forEach(take);
    }
  };

  const run = async () => {
    let failures = 0;
    while (!controller.signal.aborted) {
      try {
        await once();
        failures = 0;
      } catch (error) {
        if (controller.signal.aborted) return;
        failures += 1;
        onstate("away");
      }
      const pause = Math.min(RETRY_MS_MAX, retry * 2 ** Math.max(0, failures - 1));
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  };
  run();
  return () => controller.abort();
}
