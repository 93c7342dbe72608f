# expects: which it has not reduced yet
import torch


def reduce_as_they_come(gradients, layers, group):
    whole = [0] * layers
    for layer, gradient in gradients:
        whole[layer] = whole[layer] + gradient.flatten()
    return [group.reduce_scatter(torch.nn.functional.pad(one, (0, -len(one) % group.size))) for one in whole]
