// The weights of Sphinx's search, with sections whose title contains the query before pages that only mention it.
var Scorer = {
  score: (result) => result[4] + (result[6] === "title" ? 40 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
