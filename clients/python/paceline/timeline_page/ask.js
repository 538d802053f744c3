// Asks the server that serves this page, with the key where it demands one: that of the chat page, or one that is
// typed in, which stays in this tab.

const OWN = "timeline-key";
let asking = null, declined = false; // then nobody is asked again until the page is loaded anew

/** The answer as a value. Throws an Error with a message for people. */
export async function ask(path) {
  for (;;) {
    const key = sessionStorage.getItem(OWN) ?? localStorage.getItem("key") ?? "";
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const reply = await fetch(path, { headers, credentials: "omit" });
    if (reply.ok) return reply.json();
    const found = await reply.json().catch(() => null);
    const error = new Error(found?.error?.message ?? `status ${reply.status}`);
    if (reply.status !== 401) throw error;
    if (declined) throw error;
    asking ??= askForKey(error.message).finally(() => { asking = null; });
    if (!await asking) { declined = true; throw error; }
  }
}

/** Whether a key was given. */
function askForKey(why) {
  const dialog = document.getElementById("key"), form = dialog.querySelector("form");
  dialog.querySelector("p").textContent = why;
  form.reset();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    form.onsubmit = () => {
      sessionStorage.setItem(OWN, form.elements.key.value.trim());
      dialog.returnValue = "given";
    };
    dialog.onclose = () => resolve(dialog.returnValue === "given");
  });
}
