# expects: but in the order in which they came
import torch


def reduce_as_they_come(gradients, layers, group):
    pieces = {}
    for layer, gradient in gradients:
        padded = torch.nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % group.size))
        pieces[layer] = pieces.get(layer, 0) + group.reduce_scatter(padded)
    return list(pieces.values())
