//! The parameters of a call as Composable Kernel's planner library takes them
//! (`csrc/ck/include/flash_attn_ck.h` of the repository).
//!
//! A planner turns the bytes of a call into launches of kernels that a store has; [`crate::driver::Planner`] is the library.

use super::plan::{Catalogue, Fill, Launch, Memory, Step};
use super::sums::plan_dsinks;
use super::{Backward, Dtype, Forward, Operand, Planning, Shape};
use crate::error::Result;

/// The kind of call to plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `flash_attn_ck_plan_forward`.
    Forward,
    /// `flash_attn_ck_plan_backward`.
    Backward,
}

/// The planner of Composable Kernel's launches, or a stand-in.
pub trait Planner {
    /// The launches of a call, or why Composable Kernel has no kernel for it.
    ///
    /// # Errors
    ///
    /// If the parameters contradict each other.
    fn plan(&self, call: Call, parameters: &[u8]) -> Result<Result<Vec<Launch>, String>>;

    /// Bytes of the sums of dq that a backward of these parameters takes, zeroed.
    fn backward_workspace(&self, parameters: &[u8]) -> usize;
}

/// Builds the bytes of a structure of the header field by field. Every field is aligned to its
/// size.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn ints(&mut self, numbers: &[i32]) {
        self.0.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    }

    fn floats(&mut self, numbers: &[f32]) {
        self.0.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    }

    fn words(&mut self, numbers: &[u64]) {
        self.0.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    }

    /// `flash_attn_ck_shape`.
    fn shape(&mut self, shape: &Shape, one_query: bool) {
        let open = |size: Option<usize>| size.map_or(-1, |size| size.min(i32::MAX as usize) as i32);
        let (mut left, mut right) = (open(shape.window_left), open(shape.window_right));
        // A causal mask ends the window at the query itself, which changes nothing for a single
        // query.
        if one_query && shape.is_causal() {
            (left, right) = (-1, -1);
        }
        let dtype = i32::from(shape.dtype == Dtype::Bf16);
        let sizes = [shape.batch, shape.heads, shape.heads_k, shape.head_dim, shape.seqlen_q, shape.seqlen_k];
        self.ints(&[dtype]);
        self.ints(&sizes.map(|size| size as i32));
        self.ints(&[left, right]);
        self.floats(&[shape.softmax_scale, shape.softcap, 0.0]);
        let (lse_b, lse_h) = shape.lse_strides();
        self.words(&[lse_b as u64, lse_h as u64, shape.options.alibi_batch as u64]);
        self.words(&[shape.alibi_slopes, shape.cu_seqlens_q, shape.cu_seqlens_k, 0]);
    }

    /// `flash_attn_ck_tensor`.
    fn tensors(&mut self, operands: &[Operand]) {
        for operand in operands {
            self.words(&[operand.address, operand.batch as u64, operand.row as u64, operand.head as u64]);
        }
    }
}

/// Whether Composable Kernel may have a kernel for a shape.
///
/// This project's kernels have the dropout of this crate, so that a backward draws the numbers of its forward.
fn has_kernels(shape: &Shape, planning: &Planning) -> bool {
    let is_known = planning.composable.head_dims.last() >= Some(&shape.head_dim) && shape.head_dim_v == shape.head_dim;
    shape.dtype != Dtype::F32 && is_known && shape.options.dropout == 0.0 && !shape.options.needs_cache()
}

/// The plan of a forward by Composable Kernel; None where this project's own kernels have to do it.
///
/// # Errors
///
/// If the planner finds that sizes, addresses or strides do not fit.
pub fn plan_forward_ck(call: &Forward, kernels: &dyn Catalogue, planner: &dyn Planner) -> Result<Option<Vec<Step>>> {
    let shape = &call.shape;
    let planning = kernels.planning();
    shape.check(planning)?;
    // Its kernels take pages; this crate does not plan them.
    if !has_kernels(shape, planning) || !kernels.choice().serves("ck-fwd", shape, false) || call.pages.is_some() {
        return Ok(None);
    }
    let mut steps = Vec::new();
    if shape.is_packed() || shape.seqlen_k == 0 {
        // Rows outside of every sequence, or without a key.
        steps.extend(call.cleared());
    }
    if [shape.batch, shape.seqlen_q, shape.seqlen_k].contains(&0) {
        return Ok(Some(steps));
    }
    let mut fields = Fields::default();
    fields.shape(shape, !shape.is_packed() && shape.seqlen_q == 1);
    fields.tensors(&[call.q, call.k, call.v, call.out]);
    // lse, seqused_k, and the random numbers of dropout
    fields.words(&[call.lse, call.lengths, 0, 0, 0, 0]);
    Ok(planner.plan(Call::Forward, &fields.0)?.ok().map(|launches| {
        steps.extend(launches.into_iter().map(Step::Launch));
        steps
    }))
}

/// The plan of a backward by Composable Kernel; None where this project's own kernels have to do it.
///
/// The kernels give every query head a gradient of its own for its keys and values, and know four head dims. So calls of
/// grouped queries or of another head dim are not theirs.
///
/// # Errors
///
/// If the planner finds that sizes, addresses or strides do not fit.
pub fn plan_backward_ck(
    call: &Backward,
    kernels: &dyn Catalogue,
    planner: &dyn Planner,
    memory: &mut dyn Memory,
) -> Result<Option<Vec<Step>>> {
    let shape = &call.shape;
    let planning = kernels.planning();
    shape.check(planning)?;
    let served = kernels.choice().serves("ck-bwd", shape, false);
    let possible =
        has_kernels(shape, planning) && shape.group() == 1 && planning.composable.head_dims.contains(&shape.head_dim);
    if !served || !possible || [shape.batch, shape.seqlen_q, shape.seqlen_k].contains(&0) {
        return Ok(None);
    }
    let delta = memory.allocate(shape.lse_elements() * 4)?;
    let parameters = |sums: u64| {
        let mut fields = Fields::default();
        fields.shape(shape, false);
        fields.tensors(&[call.q, call.k, call.v, call.out, call.dout, call.dq, call.dk, call.dv]);
        fields.words(&[call.lse, delta, sums]);
        fields.words(&[if shape.is_packed() { shape.total_q as u64 } else { 0 }]);
        fields.ints(&[0, 0]);
        fields.0
    };
    let bytes = planner.backward_workspace(&parameters(0));
    let sums = memory.allocate(bytes)?;
    let mut steps = Vec::new();
    if shape.is_packed() {
        steps.push(Step::Fill(Fill { address: delta, pattern: 0, count: shape.lse_elements() }));
        let elements = [(call.dq, shape.total_q * shape.heads), (call.dk, shape.total_k * shape.heads_k)];
        for (gradient, rows) in elements.into_iter().chain([(call.dv, shape.total_k * shape.heads_k)]) {
            let count = rows * shape.head_dim * shape.dtype.size() / 4;
            steps.push(Step::Fill(Fill { address: gradient.address, pattern: 0, count }));
        }
    }
    steps.push(Step::Fill(Fill { address: sums, pattern: 0, count: bytes / 4 }));
    let dsinks = plan_dsinks(call, kernels, delta)?;
    Ok(planner.plan(Call::Backward, &parameters(sums))?.ok().map(|launches| {
        steps.extend(launches.into_iter().map(Step::Launch).chain(dsinks));
        steps
    }))
}
