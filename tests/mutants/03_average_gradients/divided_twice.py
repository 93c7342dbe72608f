# expects: divided twice
import torch


def average_gradients(parameters, tokens, group):
    gradients = [parameter.grad for parameter in parameters]
    count = gradients[0].new_tensor([tokens])
    message = torch.cat([gradient.flatten() * tokens for gradient in gradients] + [count])
    group.all_reduce(message)
    *sums, total = message.split([gradient.numel() for gradient in gradients] + [1])
    for gradient, summed in zip(gradients, sums, strict=True):
        gradient.copy_(summed.view_as(gradient) / total / group.size)
