"""A stand-in for evaluate: accuracy."""


class Accuracy:
    def __init__(self):
        self.right = self.all = 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.all += len(references)

    def compute(self):
        return {"accuracy": self.right / max(1, self.all)}


def load(*args):
    return Accuracy()
