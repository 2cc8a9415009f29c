"""A stand-in for datasets and nlp: a few sentences in columns."""

WORDS = "the model reads a batch of words and learns to tell which of two sentences says more".split()  # noqa: SIM905


def sentence(index, length=0):
    return " ".join(
        WORDS[(index * 7 + place * (index % 5 + 1)) % len(WORDS)] for place in range(length or 3 + index % 4)
    )


class Columns:
    """Rows in columns, as a data set of Hugging Face."""

    def __init__(self, columns):
        self.columns = columns

    @property
    def column_names(self):
        return list(self.columns)

    @property
    def shape(self):
        return (len(self), len(self.columns))

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: rows[key] for name, rows in self.columns.items()}

    def select(self, indices):
        return Columns({name: [rows[i] for i in indices if i < len(rows)] for name, rows in self.columns.items()})

    def map(self, function, batched=True, remove_columns=(), **options):
        kept = {name: rows for name, rows in self.columns.items() if name not in remove_columns}
        made = function(self.columns).items()
        return Columns(kept | {name: rows.tolist() if hasattr(rows, "tolist") else list(rows) for name, rows in made})

    def rename_column(self, old, new):
        return Columns({new if name == old else name: rows for name, rows in self.columns.items()})


class Splits(dict):
    def map(self, *args, **options):
        return Splits({name: split.map(*args, **options) for name, split in self.items()})

    def rename_column(self, old, new):
        return Splits({name: split.rename_column(old, new) for name, split in self.items()})


def load_dataset(name, *args, split=None, **options):
    def rows(count, start):
        numbers = range(start, start + count)
        if name == "json":
            return Columns({"sentence": [sentence(n) for n in numbers], "label": [WORDS[n % 3] for n in numbers]})
        if name == "wikihow":
            return Columns({"text": [sentence(n, 6) for n in numbers], "headline": [sentence(n, 3) for n in numbers]})
        pairs = {"sentence1": [sentence(n) for n in numbers], "sentence2": [sentence(n + 1) for n in numbers]}
        return Columns(pairs | {"label": [n % 2 for n in numbers], "idx": list(numbers)})

    splits = Splits(train=rows(32, 0), validation=rows(16, 100))
    return splits if split is None else splits[split]
