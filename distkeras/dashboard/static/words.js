// The words of distkeras on the page: titles and labels with them have tooltips, and a list is at the end of the page.

/** Each word, the beginning by which a text is searched for it, and its meaning. */
const WORDS = [
  ["attempt", "attempt", "One try to train a partition: a worker that takes a partition over is its next attempt."],
  ["backlog", "backlog", "What waits at a stream's source and has not been read yet."],
  ["center", "center", "The shared weights at the server, which all workers read and change; the model that is trained."],
  ["clock", "clock", "The number of commits that the center has received."],
  ["commit", "commit", "The change of the weights that a worker sends to the server after a few mini-batches."],
  ["computing", "comput", "The share of a worker's time in which it reads rows and takes steps."],
  ["driver", "driver", "The process that started the job and watches it."],
  ["epoch", "epoch", "One pass over all rows; a mean over the partitions, which do not end it at the same time."],
  ["fenced", "fenced", "A request was rejected because another attempt has taken the partition over."],
  ["gap", "gap", "How far the center has moved since a worker read it: the root mean square over the weights, at a commit."],
  ["lag", "lag", "The longest time that a row of a micro-batch can have waited until a snapshot covered it."],
  ["micro-batch", "micro-batch", "The rows of a stream that Spark hands over at a time."],
  ["mini-batch", "mini-batch", "The rows of one step of a worker's optimizer."],
  ["partition", "partition", "The part of the rows on which one worker trains."],
  ["refusal", "refus", "The server rejected a commit because it was too stale; its mini-batches are trained again."],
  ["retry", "retr", "A failed worker's partition was taken over by another attempt."],
  ["rule", "rule", "The algorithm by which workers and server combine their weights."],
  ["sample", "sample", "One row in one epoch."],
  ["scale", "scale", "The factor by which the rule multiplies a commit before it reaches the center."],
  ["skipped", "skip", "A commit was left out because it had a NaN or an infinity."],
  ["snapshot", "snapshot", "A saved copy of the server's state, from which the job continues after a failure."],
  ["staleness", "stale", "The number of commits that reached the center while a worker prepared its own."],
  ["takeover", "takeover", "Another attempt continues the partition of a worker that failed or does not respond."],
  ["validation", "validation", "Measured with the center on rows that are not trained on."],
  ["wait", "wait", "The share of a worker's time in which it waits for the other workers of a round."],
  ["window", "window", "The number of mini-batches between two commits of a worker."],
  ["wire", "wire", "The share of a worker's time that the network and the server take."],
  ["worker", "worker", "A process of Spark that trains a copy of the model on one partition of the rows."],
].map(([word, beginning, meaning]) => ({ word, pattern: new RegExp(`\\b${beginning}`, "i"), meaning }));
/** The elements that have tooltips: titles and labels, but not the texts of events and errors. */
const EXPLAINED = new Set(["BUTTON", "DT", "H3", "LABEL", "OPTION", "SPAN", "SUMMARY", "TH"]);

/** The meanings of the words in a text. */
function meaningOf(text) {
  return WORDS.filter(({ pattern }) => pattern.test(text)).map(({ word, meaning }) => `${word}: ${meaning}`).join("\n");
}

/** The list of all words, for readers without a pointer and for print. */
function wordList() {
  const entries = WORDS.flatMap(({ word, meaning }) => [h("dt", { text: word }), h("dd", { text: meaning })]);
  return h("footer", {}, h("details", { class: "words" }, h("summary", { text: "Words on this page" }), h("dl", {}, ...entries)));
}
