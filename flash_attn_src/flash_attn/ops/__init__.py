"""Operations beside attention: norms, rotary embedding, cross entropy."""
