const make = (tag, attributes = {}, ...inside) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
};

// ---- commands that can be copied
const copied = async (button, text) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page from a file, or without the permission
    const area = make("textarea", {style: "position:fixed;opacity:0"});
    document.body.append(area);
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
};
const withCopy = pre => {
  const button = make("button", {class: "copy", type: "button"}, "Copy");
  button.addEventListener("click", () => copied(button, pre.textContent));
  const box = make("div", {class: "command"});
  pre.replaceWith(box);
  box.append(pre, button);
  return box;
};
for (const pre of document.querySelectorAll("pre.copied")) withCopy(pre);

// ---- on a phone each cell stands in a line of its own, behind the title of its column
for (const stack of document.querySelectorAll("table.stack:not(#cases)")) {
  const titles = [...stack.tHead.rows[0].cells].map(cell => cell.textContent);
  for (const row of stack.tBodies[0].rows) [...row.cells].forEach((cell, i) => { cell.dataset.title = titles[i]; });
}

// ---- the table, of whose rows only those that are looked at are made
const CHUNK = 100;
const table = document.getElementById("cases");
if (table) {
  const data = JSON.parse(document.getElementById("data").textContent);
  const columns = data.columns.map((column, at) => ({...column, at, coded: !["case", "ratio"].includes(column.kind)}));
  const all = columns.filter(c => c.kind !== "hidden" && c.kind !== "note" && !(c.kind === "pick" && c.values.length < 2));
  let shownColumns = all;  // but for outputs that no chosen case has
  const column = title => columns.find(c => c.title === title);
  const [caseColumn, note, library] = [column("case"), column("note"), column("library")];
  const rows = Array.from({length: data.rows}, () => []);
  for (const {kind, values, cells, at} of columns) {  // as _packed of page_data.py says
    const place = text => parseInt(text, 36);
    let i = 0, line = [];
    for (const part of rows.length ? cells.split("|") : []) {
      if (kind === "case") {
        const [shared, ...others] = part.split(" ").map(place);
        line = [...line.slice(0, shared), ...others.map(word => values[word])];
        rows[i++][at] = line.join(",");
        continue;
      }
      const [value, count = "1"] = part.split("*");
      for (let left = place(count); left; left--) rows[i++][at] = kind === "ratio" ? values[place(value)] : place(value);
    }
  }
  const line = row => row[caseColumn.at];
  const text = (row, c) => c.coded ? c.values[row[c.at]] : "";
  const ratio = text => text.startsWith("inf") ? Infinity : text === "" ? -1 : parseFloat(text);
  const number = text => text.startsWith(".") ? "0" + text : text;
  const form = document.querySelector(`.filters[data-table="cases"]`);
  const count = form.querySelector("output"), search = form.querySelector("input");
  const body = table.tBodies[0], more = document.querySelector(".more");
  let chosen = rows.map((_, i) => i), made = 0, sorted = null, falling = false;

  const key = c => row => c.kind === "ratio" ? ratio(row[c.at]) : c.kind === "case" ? line(row) : row[c.at];
  const searched = row => (line(row) + " " + columns.map(c => text(row, c)).join(" ")).toLowerCase();

  const cell = (row, c, at) => {
    if (c.kind === "badge") {
      const value = text(row, c);
      return make("td", {}, make("span", {class: "badge s-" + value}, value));
    }
    if (c.kind === "ratio") {
      const [worst, noticed] = row[c.at].split(" ");
      const td = make("td", {class: "number"}, number(worst));
      if (noticed) td.append(make("br"), make("small", {class: "faint"}, noticed));
      return td;
    }
    if (c.kind === "case") {
      const opens = data.details[at] || (library && data.commands[text(row, library)]);
      const td = make("td", {class: "case mono"}, opens ? make("a", {href: "#case-" + at}) : make("span"));
      // a line may end behind each word
      line(row).split(/(?<=,)/).forEach(word => td.firstChild.append(word, make("wbr")));
      if (note && text(row, note)) td.append(make("br"), make("span", {class: "faint"}, text(row, note)));
      return td;
    }
    return make("td", {}, text(row, c));
  };
  const details = i => {
    const row = rows[i], box = make("div", {class: "below"});
    const command = library && data.commands[text(row, library)];
    if (command) {
      const pre = make("pre", {}, command.replace("CASE", () => line(row)));
      box.append(pre);
      withCopy(pre);
    }
    const blocks = data.details[i] || [];
    for (const [kind, first, titles, points] of blocks) {
      if (kind === "picture") {
        const rows = titles.map(r => make("div", {}, ...[...r].map(level => make("i", {class: "l-" + (level === "." ? 0 : level)}))));
        box.append(make("figure", {}, make("figcaption", {class: "faint"}, first), make("div", {class: "picture", role: "img", "aria-label": first}, ...rows)));
        continue;
      }
      if (kind !== "table") { box.append(make(kind, {}, first)); continue; }
      const head = make("tr", {}, ...titles.map(t => make("th", {scope: "col", class: "number"}, t)));
      const lines = points.map(p => make("tr", {}, ...p.map(v => make("td", {class: "number"}, v))));
      box.append(make("div", {class: "scroll"}, make("table", {class: "mono"}, make("caption", {}, first),
        make("thead", {}, head), make("tbody", {}, ...lines))));
    }
    if (!blocks.length && command) box.append(make("p", {class: "faint"}, "This page has no more of this case; the JSON document has."));
    return make("tr", {class: "chosen", id: "details-" + i}, make("td", {colspan: shownColumns.length}, box));
  };
  const grow = to => {
    const fresh = document.createDocumentFragment();
    for (; made < Math.min(to, chosen.length); made++) {
      const i = chosen[made];
      const cells = shownColumns.map(c => cell(rows[i], c, i));
      cells.forEach((made, at) => { if (shownColumns[at].kind !== "case") made.dataset.title = shownColumns[at].title; });
      fresh.append(make("tr", {id: "case-" + i}, ...cells));
    }
    body.append(fresh);
    more.hidden = made >= chosen.length;
  };
  const show = () => {
    shownColumns = all.filter(c => c.kind !== "ratio" || chosen.some(i => rows[i][c.at] !== ""));
    all.forEach((c, i) => { head.cells[i].hidden = !shownColumns.includes(c); });
    body.replaceChildren();
    made = 0;
    count.textContent = chosen.length + " of " + rows.length;
    grow(CHUNK);
  };
  const choose = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const picked = [...form.querySelectorAll("select")].filter(s => s.value !== "").map(s => [s.name, +s.value]);
    chosen = [];
    rows.forEach((row, i) => {
      if (picked.every(([at, value]) => row[at] === value) &&
          (!words.length || words.every(w => searched(row).includes(w)))) chosen.push(i);
    });
    if (sorted) {
      const value = key(sorted), keys = new Map(chosen.map(i => [i, value(rows[i])]));
      const way = falling ? -1 : 1;
      chosen.sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        return x < y ? -way : x > y ? way : a - b;
      });
    }
    show();
  };

  const head = make("tr");
  for (const c of all) {
    const button = make("button", {type: "button"}, c.title);
    const th = make("th", {scope: "col", class: c.kind === "ratio" ? "number" : ""}, button);
    button.addEventListener("click", () => {
      falling = sorted === c ? !falling : c.kind === "ratio" || c.kind === "badge";
      sorted = c;
      for (const other of head.cells) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", falling ? "descending" : "ascending");
      choose();
    });
    head.append(th);
  }
  table.tHead.append(head);
  for (const c of columns.filter(c => c.coded && c.kind !== "note" && c.values.length > 1)) {
    const select = make("select", {name: c.at}, make("option", {value: ""}, "all"));
    c.values.forEach((value, i) => { if (value) select.append(make("option", {value: i}, value)); });
    form.insertBefore(make("label", {}, c.title + " ", select), search);
  }
  form.addEventListener("input", choose);
  form.addEventListener("submit", event => event.preventDefault());
  more.addEventListener("click", () => grow(made + CHUNK));
  new IntersectionObserver(seen => { if (seen[0].isIntersecting && made) grow(made + CHUNK); }).observe(more);

  // A link to a case, of a point or of a row, opens what is below the row.
  const open = () => {
    const cause = /^#cause-(\d+)$/.exec(location.hash);
    if (cause) {
      const select = form.querySelector(`select[name="${column("cause").at}"]`);
      select.value = column("cause").values.findIndex(v => v.startsWith(cause[1] + " "));
      choose();
      form.scrollIntoView();
      return;
    }
    const found = /^#case-(\d+)$/.exec(location.hash), i = found ? +found[1] : -1;
    if (!rows[i]) return;
    if (!chosen.includes(i)) {
      form.reset();
      choose();
    }
    grow(chosen.indexOf(i) + 1);
    const row = document.getElementById("case-" + i);
    const there = document.getElementById("details-" + i);
    if (there) there.remove(); else row.after(details(i));
    row.scrollIntoView({block: "center"});
  };
  body.addEventListener("click", event => {  // of the link that is the address already: fold it, or open it again
    const link = event.target.closest("a");
    if (link && link.hash === location.hash) { event.preventDefault(); open(); }
  });
  addEventListener("hashchange", open);
  choose();
  open();
}
