// Conversations, in this browser's IndexedDB, and the key, in its local storage.

const NAME = "paceline";
const STORE = "conversations";

/** All conversations of this browser. A change is there after a reload once its promise is resolved. */
export class Store {
  #opened = null;

  /** Without their turns, newest first: {id, changed, title}. */
  async list() {
    const all = await this.#do("readonly", (store) => store.getAll());
    return all.map(({ id, changed, title }) => ({ id, changed, title })).sort((a, b) => b.changed - a.changed);
  }

  /** A conversation; undefined if there is none of this id. */
  get(id) {
    return this.#do("readonly", (store) => store.get(id));
  }

  /** Keep a conversation as it is now. */
  put(conversation) {
    return this.#do("readwrite", (store) => store.put(conversation));
  }

  /** Forget a conversation. */
  remove(id) {
    return this.#do("readwrite", (store) => store.delete(id));
  }

  async #do(mode, ask) {
    this.#opened ??= open();
    const database = await this.#opened;
    return new Promise((resolve, reject) => {
      const transaction = database.transaction(STORE, mode);
      const request = ask(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** The caller's key; "" if there is none. */
export const key = {
  get: () => localStorage.getItem("key") ?? "",
  set: (value) => localStorage.setItem("key", value),
  forget: () => localStorage.removeItem("key"),
};
