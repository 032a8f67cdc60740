// Signs a person in; the server answers with a cookie that scripts cannot read.

const form = document.getElementById("form");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = JSON.stringify(Object.fromEntries(new FormData(form)));
  const response = await fetch("/sign-in", { method: "POST", body }).catch(() => null);
  if (response?.ok) return location.assign("/");
  document.getElementById("problem").textContent = response ? await response.text() : "no reply from the console";
});
