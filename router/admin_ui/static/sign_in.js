// Asks for the admin token, also after the router has refused one.

import { h } from "./vendor/preact.mjs";

const SAYING = {
  signed_out: null,
  connecting: null,
  refused: "The router does not take this token. Give the one in its --admin-token-file, or a key or token with a role.",
  missing: "There is no admin API here. Start the router with --admin-token-file FILE.",
};

export function signIn({ link }, actions) {
  const problem = SAYING[link.state];
  const isBusy = link.state === "connecting";
  const submit = (event) => {
    event.preventDefault();
    const token = new FormData(event.target).get("token").trim();
    if (token) actions.signIn(token);
  };
  return h("main", { class: "sign-in" },
    h("img", { src: "ui/icon.svg", alt: "", width: 40, height: 40 }),
    h("h1", null, "Twinfang"),
    h("p", { class: "quiet" }, "Servers, load and requests of this router."),
    h("form", { onSubmit: submit },
      h("label", { for: "token" }, "Admin token"),
      h("input", {
        id: "token", name: "token", type: "password", required: true, autocomplete: "off", spellcheck: false,
        disabled: isBusy, autofocus: true,
        "aria-invalid": problem ? "true" : "false", "aria-describedby": "token-problem",
      }),
      h("p", { class: "problem", id: "token-problem", role: "alert" }, problem),
      h("button", { class: "button is-primary", disabled: isBusy }, isBusy ? "Connecting …" : "Open the dashboard"),
    ),
    h("p", { class: "quiet small" }, "The token stays in this tab and is forgotten when the tab is closed."),
  );
}
