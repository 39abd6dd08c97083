// The theme's search is a dialog without a name, which screen readers need.
document.querySelector(".md-search")?.setAttribute("aria-label", document.querySelector(".md-search__input")?.placeholder ?? "Search");
