//! Attention on a GPU for tensors in host memory: copies them to the GPU, computes, copies the
//! results back.

use super::{run, Workspace};
use crate::driver::{Kernels, Stream};
use crate::error::Result;
use crate::launch::{Backward, Forward, Memory, Operand, Pages, Shape};
use crate::memory::{collect, copied, zeros};

/// A device, one of its streams, and device memory.
pub(crate) struct Session<'a> {
    pub kernels: &'a Kernels,
    pub stream: &'a Stream,
    pub workspace: &'a mut Workspace,
}

/// Tensors of a forward, dense, as bytes. Packed sequences have checked `seqlens`.
pub(crate) struct HostForward<'a> {
    /// Without addresses.
    pub shape: Shape,
    pub q: &'a [u8],
    pub k: &'a [u8],
    pub v: &'a [u8],
    pub slopes: Option<&'a [f32]>,
    pub seqlens: Option<(&'a [i32], &'a [i32])>,
    /// The block table, its columns and the page size.
    pub pages: Option<(&'a [i32], usize, usize)>,
}

/// The inputs of a backward in addition to the tensors of its forward.
pub(crate) struct HostBackward<'a> {
    pub forward: HostForward<'a>,
    pub out: &'a [u8],
    pub dout: &'a [u8],
    pub lse: &'a [f32],
}

/// The fp32 numbers whose bytes these are.
fn floats(bytes: &[u8], what: &'static str) -> Result<Vec<f32>> {
    let mut numbers = zeros(bytes.len() / size_of::<f32>(), what)?;
    bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(bytes);
    Ok(numbers)
}

impl Session<'_> {
    /// Copies bytes to memory of the workspace and returns its address.
    fn put(&mut self, content: &[u8]) -> Result<u64> {
        let address = self.workspace.allocate(content.len())?;
        let owned = copied(content, "a copy to the device")?;
        // SAFETY: the workspace gave so many bytes.
        unsafe { self.stream.copy_to(owned, address)? };
        Ok(address)
    }

    fn get(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        // SAFETY: the workspace gave at least so many bytes.
        unsafe { self.stream.copy_from(address, length) }
    }

    /// Copies a call's tensors to the device. Memory for the result and the logarithms is only reserved.
    fn place(&mut self, call: &HostForward<'_>) -> Result<Forward> {
        let mut shape = call.shape;
        let packed = call.seqlens.is_some();
        let operand = |address, rows: usize, heads: usize| {
            if packed {
                Operand::packed(address, heads, shape.head_dim)
            } else {
                Operand::dense(address, rows, heads, shape.head_dim)
            }
        };
        let q = operand(self.put(call.q)?, shape.seqlen_q, shape.heads);
        let (k, v) = (self.put(call.k)?, self.put(call.v)?);
        let keys = |address| match call.pages {
            Some((_, _, size)) => Operand::dense(address, size, shape.heads_k, shape.head_dim),
            None => operand(address, shape.seqlen_k, shape.heads_k),
        };
        let (k, v) = (keys(k), keys(v));
        let out = operand(self.workspace.allocate(call.q.len())?, shape.seqlen_q, shape.heads);
        let lse = self.workspace.allocate(shape.lse_elements() * 4)?;
        if let Some(slopes) = call.slopes {
            shape.alibi_slopes = self.put(bytemuck::cast_slice(slopes))?;
        }
        let mut lengths = 0;
        if let Some((starts_q, starts_k)) = call.seqlens {
            shape.cu_seqlens_q = self.put(bytemuck::cast_slice(starts_q))?;
            // Equal addresses mean that each sequence has as many keys as queries.
            shape.cu_seqlens_k =
                if starts_k == starts_q { shape.cu_seqlens_q } else { self.put(bytemuck::cast_slice(starts_k))? };
            if call.pages.is_some() {
                let each = starts_k.windows(2).map(|pair| pair[1] - pair[0]);
                let each: Vec<i32> = collect(each.len(), each, "the lengths of sequences")?;
                lengths = self.put(bytemuck::cast_slice(&each))?;
            }
        }
        let mut pages = None;
        if let Some((table, columns, size)) = call.pages {
            let table = self.put(bytemuck::cast_slice(table))?;
            pages = Some(Pages { table, stride: columns, columns, size });
        }
        Ok(Forward { shape, q, k, v, out, lse, pages, lengths })
    }

    /// The forward: bytes of the result, and the logarithms of the sums in the kernels' own layout.
    pub fn forward(&mut self, call: &HostForward<'_>) -> Result<(Vec<u8>, Vec<f32>)> {
        self.workspace.reset();
        let placed = self.place(call)?;
        let steps = self.kernels.sources().forward(&placed, self.workspace)?;
        // SAFETY: every address is of the workspace, as large as the shape says, and read back below.
        unsafe { run(self.kernels, self.stream, &steps)? };
        let out = self.get(placed.out.address, call.q.len())?;
        let lse = self.get(placed.lse, placed.shape.lse_elements() * 4)?;
        Ok((out, floats(&lse, "the logarithms of the softmax sums")?))
    }

    /// The backward: bytes of dq, dk and dv.
    pub fn backward(&mut self, call: &HostBackward<'_>) -> Result<[Vec<u8>; 3]> {
        self.workspace.reset();
        let placed = self.place(&call.forward)?;
        let like = |operand: Operand, address| Operand { address, ..operand };
        let (out, dout) = (self.put(call.out)?, self.put(call.dout)?);
        let lse = self.put(bytemuck::cast_slice(call.lse))?;
        let (size_q, size_k) = (call.forward.q.len(), call.forward.k.len());
        let dq = self.workspace.allocate(size_q)?;
        let [dk, dv] = [self.workspace.allocate(size_k)?, self.workspace.allocate(size_k)?];
        let backward = Backward {
            shape: placed.shape,
            dout: like(placed.q, dout),
            q: placed.q,
            k: placed.k,
            v: placed.v,
            out: like(placed.q, out),
            lse,
            dq: like(placed.q, dq),
            dk: like(placed.k, dk),
            dv: like(placed.v, dv),
            dsinks: 0,
            dbias: 0,
        };
        let steps = self.kernels.sources().backward(&backward, self.workspace)?;
        // SAFETY: as in `forward`.
        unsafe { run(self.kernels, self.stream, &steps)? };
        Ok([self.get(dq, size_q)?, self.get(dk, size_k)?, self.get(dv, size_k)?])
    }
}
