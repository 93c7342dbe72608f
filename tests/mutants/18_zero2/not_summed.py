# expects: pieces of this rank's own gradient
import torch


def reduce_as_they_come(gradients, layers, group):
    pieces = [0] * layers
    for layer, gradient in gradients:
        padded = torch.nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % group.size))
        pieces[layer] = pieces[layer] + padded.chunk(group.size)[group.rank]
    return pieces
