// A token in the address is in its fragment, which no browser sends. It is removed from the address and the history,
// and submitted with the form.
function take() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    history.replaceState(null, "", location.pathname);
    document.getElementById("token").value = given;
    document.getElementById("login").submit();
  }
}

// If this page is open already, an address with another fragment does not reload it.
addEventListener("hashchange", take);
take();
