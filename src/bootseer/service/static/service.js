// Updates open pages: when the service sends an event that a start has changed, the page is fetched again and its main
// part replaced. Without JavaScript, and while the service cannot be reached, the page stays as it is.
"use strict";
if (document.body.hasAttribute("data-live") && "EventSource" in window) {
  let asking = false, again = false;
  const refresh = async () => {
    if (asking) { again = true; return; }
    asking = true;
    try {
      const answer = await fetch(location.href, {headers: {accept: "text/html"}});
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const [here, there] = [document.getElementById("main"), page.getElementById("main")];
        const shown = () => { here.replaceChildren(...there.childNodes); document.dispatchEvent(new Event("shown")); };
        // Do not replace a form that is being filled in.
        if (there && !here.contains(document.activeElement)) shown();
        else if (there && document.activeElement === here) shown();
      }
    } catch (error) { /* the service cannot be reached: events arrive again once it is back */ }
    asking = false;
    if (again) { again = false; refresh(); }
  };
  new EventSource("/events").addEventListener("changed", refresh);
}
document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  const places = {f: "/", n: "/now", o: "/nodes", c: "/caches"};
  if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && places[event.key]) location.href = places[event.key];
});
