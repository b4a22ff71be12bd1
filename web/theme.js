// Sets the chosen theme before anything is painted; a module would come too late.
"use strict";
try {
  const theme = JSON.parse(localStorage.getItem("slipstream.settings") || "{}").theme;
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage that is off or holds something else: the system's theme it is.
}
