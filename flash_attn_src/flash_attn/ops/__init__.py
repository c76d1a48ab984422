"""Operations other than attention: norms, rotary embedding, cross entropy."""
