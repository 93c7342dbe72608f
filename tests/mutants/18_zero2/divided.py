# expects: it is divided by the
import torch


def reduce_as_they_come(gradients, layers, group):
    pieces = [0] * layers
    for layer, gradient in gradients:
        padded = torch.nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % group.size))
        pieces[layer] = pieces[layer] + group.reduce_scatter(padded) / group.size
    return pieces
