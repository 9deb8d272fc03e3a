// What the report page can do beyond being read: tooltips, zoom, search, sorting, filtering.
// Texts from the data only ever become text nodes or attribute values, never markup.
"use strict";
(() => {
  const root = document.documentElement;
  window.addEventListener("error", (event) => { root.dataset.error = event.message; });
  document.addEventListener("securitypolicyviolation", (event) => { root.dataset.error = event.violatedDirective; });

  // Pages of the service that hold no report have no data.
  const data = JSON.parse(document.getElementById("data")?.textContent ?? '{"span": [0, 1]}');
  const gantt = document.getElementById("gantt");
  const [low, high] = data.span;

  const svg = (name, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const html = (name, css, ...children) => {
    const element = document.createElement(name);
    element.className = css;
    element.append(...children);
    return element;
  };
  const percent = (ms) => `${(100 * (ms - low)) / (high - low)}%`;
  const words = (ms) => `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;

  // Tooltips: the browser's own title is slow and cannot be styled; it stays for readers without this script.
  const tip = document.getElementById("tip");
  const said = new WeakMap();
  const textOf = (shape) => {
    const title = shape.querySelector(":scope > title");
    if (title) {
      said.set(shape, title.textContent);
      title.remove();
    }
    return said.get(shape);
  };
  document.addEventListener("pointermove", (event) => {
    const shape = event.target instanceof Element ? event.target.closest(".bar rect, .bar path, .cdf line") : null;
    const text = shape && textOf(shape);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4))}px`;
    const below = event.clientY + 18;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : below}px`;
  });

  // Zoom: the rows are drawn in percent, so that two variables move them all.
  const view = { from: 0, to: 1 };
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5, 9e5, 18e5, 36e5, 72e5, 144e5];
  const clock = (ms) => {
    if (Math.abs(ms) < 60000 || ms % 1000) return `${+(ms / 1000).toFixed(3)} s`;
    const whole = ms / 1000;
    const two = (value) => String(value).padStart(2, "0");
    const hours = Math.floor(whole / 3600);
    const minutes = Math.floor((whole % 3600) / 60);
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  };
  const redrawTicks = () => {
    const ticks = gantt.querySelector(".ticks");
    const begin = low + view.from * (high - low);
    const end = low + view.to * (high - low);
    const most = gantt.querySelector(".axis").parentElement.clientWidth < 500 ? 4 : 7;
    const step = steps.find((size) => (end - begin) / size <= most) || 864e5;
    ticks.replaceChildren();
    for (let at = Math.ceil(begin / step) * step; at <= end; at += step) {
      const share = (at - begin) / (end - begin);
      const anchor = share < 0.04 ? "start" : share > 0.95 ? "end" : "middle";
      ticks.append(
        svg("line", { class: "tick", x1: percent(at), x2: percent(at), y1: 30, y2: 36 }),
        svg("text", { class: "t", x: percent(at), y: 27, "text-anchor": anchor }, clock(at)),
      );
    }
  };
  const show = (from, to) => {
    const width = Math.min(Math.max(to - from, 0.002), 1);
    view.from = Math.min(Math.max(from, 0), 1 - width);
    view.to = view.from + width;
    gantt.style.setProperty("--z", 1 / width);
    gantt.style.setProperty("--o", view.from);
    redrawTicks();
  };
  const moves = {
    in: (width) => show(view.from + width / 4, view.to - width / 4),
    out: (width) => show(view.from - width / 2, view.to + width / 2),
    left: (width) => show(view.from - width / 2, view.to - width / 2),
    right: (width) => show(view.from + width / 2, view.to + width / 2),
    all: () => show(0, 1),
  };
  const startZoom = () => {
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => moves[button.dataset.zoom](view.to - view.from));
    }
    let drag = null;
    const mark = html("div", "band");
    gantt.addEventListener("pointerdown", (event) => {
      const plot = event.target.closest(".plot");
      if (!plot || event.button !== 0 || event.pointerType === "touch") return;
      drag = { box: plot.getBoundingClientRect(), x: event.clientX, moved: false };
    });
    document.addEventListener("pointermove", (event) => {
      if (!drag || (!drag.moved && Math.abs(event.clientX - drag.x) < 6)) return;
      drag.moved = true;
      const all = gantt.getBoundingClientRect();
      const left = Math.max(Math.min(drag.x, event.clientX), drag.box.left);
      const right = Math.min(Math.max(drag.x, event.clientX), drag.box.right);
      Object.assign(mark.style, {
        left: `${left + scrollX}px`, top: `${all.top + scrollY}px`, width: `${right - left}px`, height: `${all.height}px`,
      });
      document.body.append(mark);
      event.preventDefault();
    });
    document.addEventListener("pointerup", (event) => {
      if (!drag) return;
      const { box, x, moved } = drag;
      drag = null;
      mark.remove();
      if (!moved) return;
      const share = (at) => view.from + ((at - box.left) / box.width) * (view.to - view.from);
      show(share(Math.min(x, event.clientX)), share(Math.max(x, event.clientX)));
      // The click that ends a drag must not also open the row.
      const swallow = (click) => click.preventDefault();
      gantt.addEventListener("click", swallow, { capture: true, once: true });
      setTimeout(() => gantt.removeEventListener("click", swallow, { capture: true }));
    });
    document.addEventListener("selectstart", (event) => { if (drag) event.preventDefault(); });
    addEventListener("resize", redrawTicks);
    redrawTicks();
  };

  // Search: any node of a folded page, drawn as the page draws its own rows.
  const segments = (lines) => {
    const cells = (tag, texts) => html("tr", "", ...texts.map((text, i) => html(tag, i ? "r" : "", text)));
    const body = html("tbody", "", ...lines.map((texts) => cells("td", texts)));
    return html("div", "scroll", html("table", "", html("thead", "", cells("th", ["segment", "from", "takes"])), body));
  };
  const row = ([name, rank, work, wait, outcome, start, cuts]) => {
    const shapes = [];
    const lines = [];
    let from = start;
    for (let i = 0; i < cuts.length; i += 2) {
      const [css, text] = data.looks[cuts[i]];
      const to = cuts[i + 1];
      const title = svg("title", {}, `${text}: ${words(to - from)} (${words(from)} to ${words(to)})`);
      const width = `${(100 * Math.max(to - from, 0)) / (high - low)}%`;
      shapes.push(svg("rect", { class: css, x: percent(from), y: 4, width, height: 14 }, title));
      lines.push([text, words(from), words(to - from)]);
      from = to;
    }
    for (const at of data.barriers) shapes.push(svg("line", { class: "bl", x1: percent(at), x2: percent(at), y1: 0, y2: 22 }));
    const bar = svg("svg", { class: "bar", height: 22, role: "img", "aria-label": `${name}: ${work} work, ${wait} wait` }, ...shapes);
    const who = html("span", "who", html("span", "name", name));
    if (rank >= 0) who.append(html("span", "rank", `r${rank}`));
    if (outcome !== "ok") who.append(html("b", "tag bad", outcome));
    const figures = html("span", "fig", work, html("i", "", "work"), ` ${wait}`, html("i", "", "wait"));
    const summary = html("summary", "row", who, html("div", "plot", bar), figures);
    return html("details", "node", summary, html("div", "detail", segments(lines)));
  };
  const startSearch = () => {
    const input = document.getElementById("find");
    const found = document.getElementById("found");
    if (!input) return;
    const search = () => {
      const wanted = input.value.trim().toLowerCase();
      found.replaceChildren();
      if (!wanted) return;
      const hits = data.nodes.filter((node) => node[0].toLowerCase().includes(wanted) || String(node[1]) === wanted);
      hits.sort((a, b) => (String(b[1]) === wanted) - (String(a[1]) === wanted));
      const shown = hits.slice(0, 10);
      const more = hits.length > shown.length ? `, ${shown.length} shown` : "";
      found.append(html("h3", "", `${hits.length.toLocaleString("en")} found${more}`), ...shown.map(row));
    };
    input.addEventListener("input", search);
    const asked = new URLSearchParams(location.hash.slice(1)).get("find");
    if (asked) {
      input.value = asked;
      search();
    }
  };

  // Tables: a click on a head sorts, numbers by their raw value and what is unobserved last.
  const keyOf = (cells, column) => {
    const cell = cells[column];
    if (!("sort" in cell.dataset)) return cell.textContent;
    return cell.dataset.sort === "null" ? null : Number(cell.dataset.sort);
  };
  const sortBy = (table, column, head) => {
    const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows].map((line) => [keyOf(line.cells, column), line]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
    });
    table.tBodies[0].append(...rows.map(([, line]) => line));
  };
  const startTables = () => {
    for (const table of document.querySelectorAll("table.sortable")) {
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        if (!head.textContent || head.querySelector("button")) return;
        const button = html("button", "", ...head.childNodes);
        button.type = "button";
        button.addEventListener("click", () => sortBy(table, column, head));
        head.append(button);
      });
    }
    for (const input of document.querySelectorAll("[data-filter]")) {
      const body = input.closest("details, section").querySelector("tbody");
      input.addEventListener("input", () => {
        const wanted = input.value.trim().toLowerCase();
        for (const line of body.rows) line.hidden = !line.textContent.toLowerCase().includes(wanted);
      });
    }
  };

  root.dataset.ready = "";
  if (gantt) {
    startZoom();
    startSearch();
  }
  startTables();
  document.addEventListener("shown", startTables);
})();
