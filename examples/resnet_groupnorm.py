"""The ResNet of resnet.py with GroupNorm instead of BatchNorm: samples are independent, so pipelines work.

meshwright train examples/resnet_groupnorm.py --strategy pp=2:1f1b --ranks 2 --steps 60
meshwright train examples/resnet_groupnorm.py --strategy fsdp --ranks 2 --steps 60
"""

from dataclasses import replace

from torch import nn

import resnet

GROUPS = 8


def build() -> resnet.ResNet:
    model = resnet.ResNet()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(GROUPS, child.num_features))
    return model


job = replace(resnet.job, model=build, max_norm=1.0)
