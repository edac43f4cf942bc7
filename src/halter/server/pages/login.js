// A token that comes with the address stands behind its #, which no browser sends anywhere. It is taken from there,
// out of the history as well, and sent as the form would.
function take() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    history.replaceState(null, "", location.pathname);
    document.getElementById("token").value = given;
    document.getElementById("login").submit();
  }
}

// Where this page is open already, an address that differs behind its # alone loads nothing anew.
addEventListener("hashchange", take);
take();
