//! The plan of a call by the source of kernels that is the fastest for it.

use super::choice::{self, Operation};
use super::plan::{Catalogue, Device, Memory, Step};
use super::{
    assembly, plan_backward, plan_backward_ck, plan_forward, plan_forward_ck, split_kv, Backward, Forward, Planner,
    Source,
};
use crate::error::Result;

/// Queries in a tile of Composable Kernel's forward kernels.
const FORWARD_ROWS: usize = 128;

/// The plan of a forward by the fastest source that serves it. A store without Composable Kernel, which has no planner,
/// has this project's Triton kernels alone.
///
/// # Errors
///
/// As [`plan_forward`].
pub fn plan_forward_with(
    call: &Forward,
    kernels: &dyn Catalogue,
    planner: Option<&dyn Planner>,
    device: Device,
    memory: &mut dyn Memory,
) -> Result<Vec<Step>> {
    let Some(planner) = planner else { return plan_forward(call, kernels, device, memory) };
    call.shape.check()?;
    let is_paged = call.pages.is_some() || call.lengths != 0;
    for &source in choice::sources(kernels.target(), Operation::Forward, &call.shape, is_paged) {
        if let Some(steps) = plan_forward_by(source, call, kernels, planner, device, memory)? {
            return Ok(steps);
        }
    }
    plan_forward(call, kernels, device, memory)
}

/// The plan of a forward by one source; None where it has no kernel for the call.
///
/// Composable Kernel leaves few queries of many keys, as in decoding, to this project's kernels, which split the keys.
///
/// # Errors
///
/// As [`plan_forward`].
pub fn plan_forward_by(
    source: Source,
    call: &Forward,
    kernels: &dyn Catalogue,
    planner: &dyn Planner,
    device: Device,
    memory: &mut dyn Memory,
) -> Result<Option<Vec<Step>>> {
    match source {
        Source::Assembly => assembly::plan_forward(call, kernels, device),
        Source::Triton => plan_forward(call, kernels, device, memory).map(Some),
        Source::ComposableKernel => {
            let few = split_kv::is_few(&call.shape) && split_kv::is_profitable(&call.shape, FORWARD_ROWS, device);
            if few {
                return Ok(None);
            }
            plan_forward_ck(call, planner)
        }
    }
}

/// The plan of a backward by the fastest source that serves it.
///
/// # Errors
///
/// As [`plan_backward`].
pub fn plan_backward_with(
    call: &Backward,
    kernels: &dyn Catalogue,
    planner: Option<&dyn Planner>,
    device: Device,
    memory: &mut dyn Memory,
) -> Result<Vec<Step>> {
    let Some(planner) = planner else { return plan_backward(call, kernels, device, memory) };
    call.shape.check()?;
    for &source in choice::sources(kernels.target(), Operation::Backward, &call.shape, false) {
        if let Some(steps) = plan_backward_by(source, call, kernels, planner, device, memory)? {
            return Ok(steps);
        }
    }
    plan_backward(call, kernels, device, memory)
}

/// The plan of a backward by one source; None where it has no kernel for the call. Assembly has none here.
///
/// # Errors
///
/// As [`plan_backward`].
pub fn plan_backward_by(
    source: Source,
    call: &Backward,
    kernels: &dyn Catalogue,
    planner: &dyn Planner,
    device: Device,
    memory: &mut dyn Memory,
) -> Result<Option<Vec<Step>>> {
    match source {
        Source::Assembly => Ok(None),
        Source::Triton => plan_backward(call, kernels, device, memory).map(Some),
        Source::ComposableKernel => plan_backward_ck(call, planner, memory),
    }
}
