// Starts the dashboard: one store, one feed, and a page that is drawn from the store.

import { Actions } from "./actions.js";
import { Feed } from "./feed.js";
import { viewOf } from "./header.js";
import { page } from "./page.js";
import { Store } from "./store.js";
import { readToken } from "./token.js";
import { render } from "./vendor/preact.mjs";

const root = document.getElementById("app");
const store = new Store(() => render(page(store, actions), root));
const feed = new Feed(store);
const actions = new Actions(store, feed);

addEventListener("hashchange", () => actions.show(viewOf(location.hash)));
store.view = viewOf(location.hash);

root.replaceChildren();
if (readToken()) feed.start();
else store.change(() => {});

// Ages, and the time to the next attempt, have to change even while no event comes.
setInterval(() => document.hidden || store.change(() => {}, { now: false }), 1000);
