//! Plans a call with the fastest kernel provider that supports it.

use super::plan::{Catalogue, Device, Memory, Step};
use super::planning::Operation;
use super::{
    assembly, plan_backward, plan_backward_ck, plan_forward, plan_forward_ck, split_kv, Backward, Compute, Forward,
    Planner, Shape, Source,
};
use crate::error::Result;

/// What serves the calls of a device.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    /// The kernels.
    pub kernels: &'a dyn Catalogue,
    /// The planner of Composable Kernel. Without it this project's Triton kernels serve every call.
    pub planner: Option<&'a dyn Planner>,
    /// The device.
    pub device: Device,
}

impl Sources<'_> {
    /// Plans a forward with the fastest kernel provider that supports it.
    ///
    /// # Errors
    ///
    /// As [`plan_forward`].
    pub fn forward(&self, call: &Forward, memory: &mut dyn Memory) -> Result<Vec<Step>> {
        let is_paged = call.pages.is_some() || call.lengths != 0;
        for source in self.before_triton(Operation::Forward, &call.shape, is_paged)? {
            if let Some(steps) = self.forward_by(source, call, memory)? {
                return Ok(steps);
            }
        }
        plan_forward(call, self.kernels, self.device, memory)
    }

    /// Plans a forward with one kernel provider. None if it has no kernel for the call.
    ///
    /// Composable Kernel leaves few queries of many keys, as in decoding, to this project's kernels, which split the
    /// keys.
    ///
    /// # Errors
    ///
    /// As [`plan_forward`].
    pub fn forward_by(&self, source: Source, call: &Forward, memory: &mut dyn Memory) -> Result<Option<Vec<Step>>> {
        match (source, self.planner) {
            (Source::Triton, _) => plan_forward(call, self.kernels, self.device, memory).map(Some),
            (Source::Assembly, _) => assembly::plan_forward(call, self.kernels, self.device),
            (Source::ComposableKernel, None) => Ok(None),
            (Source::ComposableKernel, Some(planner)) => {
                let (shape, planning) = (&call.shape, self.kernels.planning());
                let rows = planning.composable.rows;
                if split_kv::is_few(shape, planning) && split_kv::is_profitable(shape, rows, self.device, planning) {
                    return Ok(None);
                }
                plan_forward_ck(call, self.kernels, planner)
            }
        }
    }

    /// Plans a backward with the fastest kernel provider that supports it.
    ///
    /// # Errors
    ///
    /// As [`plan_backward`].
    pub fn backward(&self, call: &Backward, memory: &mut dyn Memory) -> Result<Vec<Step>> {
        for source in self.before_triton(Operation::Backward, &call.shape, false)? {
            if let Some(steps) = self.backward_by(source, call, memory)? {
                return Ok(steps);
            }
        }
        plan_backward(call, self.kernels, self.device, memory)
    }

    /// Plans a backward with one kernel provider. None if the provider has no kernel for the call;
    /// assembly never has one here.
    ///
    /// # Errors
    ///
    /// As [`plan_backward`].
    pub fn backward_by(&self, source: Source, call: &Backward, memory: &mut dyn Memory) -> Result<Option<Vec<Step>>> {
        match (source, self.planner) {
            (Source::Triton, _) => plan_backward(call, self.kernels, self.device, memory).map(Some),
            (Source::Assembly, _) | (Source::ComposableKernel, None) => Ok(None),
            (Source::ComposableKernel, Some(planner)) => plan_backward_ck(call, self.kernels, planner, memory),
        }
    }

    /// The sources to try before Triton's kernels, which serve every call.
    fn before_triton(
        &self,
        operation: Operation,
        shape: &Shape,
        is_paged: bool,
    ) -> Result<impl Iterator<Item = Source> + use<'_>> {
        shape.check(self.kernels.planning())?;
        let all = match self.planner {
            Some(_) if !shape.options.needs_cache() && shape.options.compute == Compute::AsStored => {
                self.kernels.choice().sources(operation, shape, is_paged)
            }
            _ => &[],
        };
        Ok(all.iter().copied().take_while(|source| *source != Source::Triton))
    }
}
