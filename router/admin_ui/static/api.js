// Calls to the admin API.

import { readToken } from "./token.js";

const ROOT = new URL("v1/", document.baseURI); // seen from /admin/ui, that is /admin/v1/
const CALL_TIMEOUT_MS = 15_000;

/** The router does not accept this token. */
export class Refused extends Error {}

/** The router answered with an error. Has the error's message. */
export class Failed extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** No answer came. */
export class Unreachable extends Error {}

/** Sends a call and returns its open response. Raises `Refused`, `Failed` or `Unreachable`. */
async function send(method, path, { body, signal, accept = "application/json" } = {}) {
  const headers = { Authorization: `Bearer ${readToken()}`, Accept: accept };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      method, headers, signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store", credentials: "omit", redirect: "error",
    });
  } catch (error) {
    throw new Unreachable(error.name === "TimeoutError" ? "no answer in time" : "no connection");
  }
  const seesNothing = response.status === 403 && method === "GET"; // other calls may need a higher role
  if (response.status === 401 || seesNothing) throw new Refused();
  if (!response.ok) throw new Failed(await messageOf(response), response.status);
  return response;
}

/** The message of an error's response. */
export async function messageOf(response) {
  try {
    const { error } = await response.json();
    return String(error.message);
  } catch {
    return `the router answered ${response.status}`;
  }
}

async function call(method, path, body) {
  const response = await send(method, path, { body, signal: AbortSignal.timeout(CALL_TIMEOUT_MS) });
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** Clients choose requests' ids, and those of two router processes may be equal. */
const ofProcess = (process) => (Number.isInteger(process) ? `?process=${process}` : "");
const one = (folder, id) => `${folder}/${encodeURIComponent(id)}`;

export const getWorkers = async () => (await call("GET", "workers")).workers;
export const getRequests = async (limit) => (await call("GET", `requests?limit=${limit}`)).requests;
export const getRequest = (id, process) => call("GET", one("requests", id) + ofProcess(process));
export const getKeys = async () => (await call("GET", "keys")).keys;
export const getModels = async () => (await call("GET", "models")).models;
export const getProcesses = () => call("GET", "processes");
export const getConfig = () => call("GET", "config");
export const getStats = () => call("GET", "stats");
export const drain = (id) => call("POST", `${one("workers", id)}/drain`);
export const undrain = (id) => call("POST", `${one("workers", id)}/undrain`);
export const abort = (id, process) => call("POST", `${one("requests", id)}/abort${ofProcess(process)}`);
export const openEvents = (signal) => send("GET", "events", { signal, accept: "text/event-stream" });
