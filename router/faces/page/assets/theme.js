// Light or dark: the system's choice until the viewer makes another one.

const KEY = "kvrelay-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function apply() {
  document.documentElement.dataset.theme = localStorage.getItem(KEY) ?? (system.matches ? "dark" : "light");
}

export function toggle() {
  localStorage.setItem(KEY, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  apply();
}

system.addEventListener("change", apply);
apply();
