import numpy as np
import torch

SIDE = 8


class Same:
    """A transform that leaves an image as it is."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, image):
        return image


class Resize(Same):
    def __call__(self, image):
        return image.resize((SIDE, SIDE))


class ToTensor(Same):
    def __call__(self, image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


RandomResizedCrop = CenterCrop = Resize
Normalize = RandomHorizontalFlip = Same
