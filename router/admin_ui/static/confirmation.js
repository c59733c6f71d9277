// Asks a person before an action that affects requests.

import { plural } from "./format.js";
import { h } from "./vendor/preact.mjs";

export function confirmation(store, actions) {
  if (!store.question) return null;
  const { title, text, warning, yes } = QUESTIONS[store.question.kind](store, store.question.id);
  const close = (event) => event.target.closest("dialog").close(event.currentTarget.value);
  return h("dialog", {
    class: "dialog", ref: showModal, "aria-labelledby": "question-title",
    onClose: (event) => actions.answer(event.target.returnValue === "yes"),
  },
    h("h2", { id: "question-title" }, title),
    h("p", null, text),
    warning && h("p", { class: "problem" }, warning),
    h("div", { class: "dialog-buttons" },
      h("button", { class: "button", value: "no", onClick: close, autofocus: true }, "Cancel"),
      h("button", { class: "button is-danger is-filled", value: "yes", onClick: close }, yes),
    ),
  );
}

/** Opens a modal dialog: the browser keeps the focus in it, and gives the focus back when it is closed. */
export const showModal = (dialog) => dialog && !dialog.open && dialog.showModal();

const QUESTIONS = {
  drain(store, id) {
    const worker = store.workers.get(id);
    const others = [...store.workers.values()].filter(
      (other) => other.id !== id && other.role === worker?.role && other.state === "serving",
    );
    return {
      title: `Drain ${id}?`,
      text: worker?.role === "prefill"
        ? "It gets no new prompts. Prompts that it computes now are finished."
        : `It gets no new requests. The ${plural(worker?.requests ?? 0, "request")} that it has will move to another `
          + "server, or end here if there is none.",
      warning: others.length === 0 && "No other server of this pool is serving: new requests will be answered with 503.",
      yes: "Drain",
    };
  },
  abort: (store, id) => ({
    title: "Abort this request?",
    text: `Request ${id} ends at once, and its client gets an error.`,
    yes: "Abort",
  }),
};
